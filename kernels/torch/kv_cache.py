"""Writes to the KV cache: with the rotation of q and k, as they are, and whole blocks copied."""

import torch

from kernels.interface.kv_cache import KVCache, KVShape, check_ids
from kernels.interface.operations import RotaryParams
from kernels.torch.elementwise import rms_norm


def view_kv_cache(blocks_BN: torch.Tensor, shape: KVShape) -> KVCache:
    """See `Operations.view_kv_cache`."""
    keys, values = shape.split(blocks_BN)
    heads = shape.block_size, shape.num_kv_heads
    keys = keys.view(len(keys), *heads, shape.key_size)
    if shape.values_in_keys:
        behind = blocks_BN[:, shape.key_bytes :]
        index = view_kv_cache(behind, shape.index) if shape.index_size else None
        return KVCache(keys, keys[..., -shape.value_size :], shape, index)
    return KVCache(keys, values.view(len(keys), *heads, shape.value_size), shape)


def write_kv_cache(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, slot_mapping_T: torch.Tensor, kv_cache: KVCache
) -> None:
    """See `Operations.write_kv_cache`."""
    size = kv_cache.shape.block_size
    at = slot_mapping_T // size, slot_mapping_T % size
    kv_cache.keys[at] = k_TKD
    if not kv_cache.shape.values_in_keys:
        kv_cache.values[at] = v_TKD


def read_kv_cache(kv_cache: KVCache, slots_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Operations.read_kv_cache`."""
    size = kv_cache.shape.block_size
    at = slots_L // size, slots_L % size
    return kv_cache.keys[at], kv_cache.values[at]


def rotary_and_cache(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_cache: KVCache | None,
    params: RotaryParams,
) -> torch.Tensor:
    """See `Operations.rotary_and_cache`. Works in place on `qkv_TN`."""
    num_query_heads, cos_sin_PD = params.num_query_heads, params.cos_sin_PD
    num_tokens = qkv_TN.shape[0]
    num_kv_heads = 0 if kv_cache is None else kv_cache.shape.num_kv_heads
    # |<----- H ----->|<-- K -->|<-- K -->|  heads of qkv; the first H + K turn together
    num_heads = qkv_TN.shape[1] // params.head_size  # which torch cannot tell of no tokens
    heads_THD = qkv_TN.view(num_tokens, num_heads, params.head_size)
    q_THD = heads_THD[:, :num_query_heads]
    k_TKD = heads_THD[:, num_query_heads : num_query_heads + num_kv_heads]
    v_TKD = heads_THD[:, num_query_heads + num_kv_heads :]
    if params.q_norm_weight_D is not None:
        q_THD.copy_(rms_norm(q_THD, params.q_norm_weight_D, params.norm_eps))
    if params.k_norm_weight_D is not None:
        k_TKD.copy_(rms_norm(k_TKD, params.k_norm_weight_D, params.norm_eps))
    if params.v_norm_weight_D is not None:
        v_TKD.copy_(rms_norm(v_TKD, params.v_norm_weight_D, params.norm_eps))
    half = cos_sin_PD.shape[1] // 2
    angles_T1D = cos_sin_PD.index_select(0, positions_T).unsqueeze(1)
    cos, sin = angles_T1D[..., :half], angles_T1D[..., half:]
    turning = heads_THD[:, : num_query_heads + num_kv_heads]
    left, right = turning[..., :half], turning[..., half : 2 * half]
    left_before_sin = left * sin
    left.mul_(cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).add_(left_before_sin)
    if kv_cache is not None:
        write_kv_cache(k_TKD, v_TKD, slot_mapping_T, kv_cache)
    return q_THD


class TorchBlockCopier:
    """See `kernels.interface.kv_cache.BlockCopier`."""

    def __init__(self, blocks_BN: torch.Tensor, num_host_blocks: int) -> None:
        self._blocks_BN = blocks_BN
        self.host_blocks = torch.empty((num_host_blocks, blocks_BN.shape[1]), dtype=torch.uint8)

    def copy(self, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor) -> None:
        _copy(self._blocks_BN, self._blocks_BN, src_ids_N, dst_ids_N)

    def swap_in(self, host_ids_N: torch.Tensor, block_ids_N: torch.Tensor) -> None:
        _copy(self.host_blocks, self._blocks_BN, host_ids_N, block_ids_N)

    def swap_out(self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor) -> None:
        _copy(self._blocks_BN, self.host_blocks, block_ids_N, host_ids_N)


def _copy(
    src_BN: torch.Tensor, dst_BN: torch.Tensor, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    check_ids(src_ids_N, dst_ids_N, len(src_BN), len(dst_BN))
    dst_BN.index_copy_(0, dst_ids_N, src_BN.index_select(0, src_ids_N))
