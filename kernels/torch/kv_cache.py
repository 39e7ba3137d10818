"""Writes to the KV cache: with the rotation of q and k, as they are, and whole blocks copied."""

from collections.abc import Sequence

import torch

from kernels.interface.block_copies import check_ids
from kernels.interface.operations import KVCache, RotaryParams
from kernels.torch.elementwise import rms_norm


def write_kv_cache(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, slot_mapping_T: torch.Tensor, kv_cache: KVCache
) -> None:
    """See `Operations.write_kv_cache`."""
    for source, cache_BSKD in zip((k_TKD, v_TKD), kv_cache, strict=True):
        cache_BSKD.view(-1, *cache_BSKD.shape[2:]).index_copy_(0, slot_mapping_T, source)


def rotary_and_cache(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_cache: KVCache,
    params: RotaryParams,
) -> torch.Tensor:
    """See `Operations.rotary_and_cache`. Works in place on `qkv_TN`."""
    num_query_heads, cos_sin_PD = params.num_query_heads, params.cos_sin_PD
    num_tokens = qkv_TN.shape[0]
    num_kv_heads = kv_cache[0].shape[2]
    # |<----- H ----->|<-- K -->|<-- K -->|  heads of qkv; the first H + K turn together
    heads_THD = qkv_TN.view(num_tokens, num_query_heads + 2 * num_kv_heads, params.head_size)
    q_THD = heads_THD[:, :num_query_heads]
    k_TKD = heads_THD[:, num_query_heads : num_query_heads + num_kv_heads]
    v_TKD = heads_THD[:, num_query_heads + num_kv_heads :]
    if params.q_norm_weight_D is not None:
        q_THD.copy_(rms_norm(q_THD, params.q_norm_weight_D, params.norm_eps))
    if params.k_norm_weight_D is not None:
        k_TKD.copy_(rms_norm(k_TKD, params.k_norm_weight_D, params.norm_eps))
    half = cos_sin_PD.shape[1] // 2
    angles_T1D = cos_sin_PD.index_select(0, positions_T).unsqueeze(1)
    cos, sin = angles_T1D[..., :half], angles_T1D[..., half:]
    turning = heads_THD[:, : num_query_heads + num_kv_heads]
    left, right = turning[..., :half], turning[..., half : 2 * half]
    left_before_sin = left * sin
    left.mul_(cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).add_(left_before_sin)
    write_kv_cache(k_TKD, v_TKD, slot_mapping_T, kv_cache)
    return q_THD


class TorchBlockCopier:
    """See `kernels.interface.block_copies.BlockCopier`."""

    def __init__(self, caches: Sequence[KVCache], num_host_blocks: int) -> None:
        self._caches = caches
        self.host_caches: list[KVCache] = []
        if num_host_blocks:
            self.host_caches = [
                (_host_blocks(keys, num_host_blocks), _host_blocks(values, num_host_blocks))
                for keys, values in caches
            ]

    def copy(self, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor) -> None:
        _copy_all(self._caches, self._caches, src_ids_N, dst_ids_N)

    def swap_in(self, host_ids_N: torch.Tensor, block_ids_N: torch.Tensor) -> None:
        _copy_all(self.host_caches, self._caches, host_ids_N, block_ids_N)

    def swap_out(self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor) -> None:
        _copy_all(self._caches, self.host_caches, block_ids_N, host_ids_N)


def _host_blocks(like: torch.Tensor, num_blocks: int) -> torch.Tensor:
    return torch.empty((num_blocks, *like.shape[1:]), dtype=like.dtype)


def _copy_all(
    src_caches: Sequence[KVCache],
    dst_caches: Sequence[KVCache],
    src_ids_N: torch.Tensor,
    dst_ids_N: torch.Tensor,
) -> None:
    if not src_caches or not dst_caches:
        raise ValueError("there is no host memory for blocks")
    check_ids(src_ids_N, dst_ids_N, len(src_caches[0][0]), len(dst_caches[0][0]))
    for src, dst in zip(src_caches, dst_caches, strict=True):
        for source, destination in zip(src, dst, strict=True):
            destination.index_copy_(0, dst_ids_N, source.index_select(0, src_ids_N))
