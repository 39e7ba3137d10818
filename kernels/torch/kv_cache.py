"""Writes to the KV cache: with the rotation of q and k, as they are, and whole blocks copied."""

import torch

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


def copy_blocks(
    src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    """See `Operations.copy_blocks`. Gathers on the source's side, so that one piece travels."""
    for source, destination in zip(src, dst, strict=True):
        gathered_NSKD = source.index_select(0, src_ids_N.to(source.device))
        destination.index_copy_(
            0, dst_ids_N.to(destination.device), gathered_NSKD.to(destination.device)
        )
