"""Rotary positions and the write to the KV cache, in torch.

Owns the rotation (arXiv:2104.09864, halves paired as in GPT-NeoX) and the cache write. Must not
know how the table of angles was made.
"""

from __future__ import annotations

import torch

from kernels.interface.operations import KVCache
from kernels.torch.elementwise import rms_norm


def write_kv_cache(
    k_TKD: torch.Tensor, v_TKD: torch.Tensor, kv_cache: KVCache, slot_mapping_T: torch.Tensor
) -> None:
    """Write keys and values to their slots, see `Operations.write_kv_cache`."""
    for source, cache_BSKD in zip((k_TKD, v_TKD), kv_cache, strict=True):
        cache_BSKD.view(-1, *cache_BSKD.shape[2:]).index_copy_(0, slot_mapping_T, source)


def rotary_and_cache(
    qkv_TN: torch.Tensor,
    *,
    num_query_heads: int,
    head_size: int,
    cos_sin_PD: torch.Tensor,
    positions_T: torch.Tensor,
    kv_cache: KVCache,
    slot_mapping_T: torch.Tensor,
    q_norm_weight_D: torch.Tensor | None,
    k_norm_weight_D: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """See `Operations.rotary_and_cache`. Works in place on `qkv_TN`."""
    num_tokens = qkv_TN.shape[0]
    num_kv_heads = kv_cache[0].shape[2]
    # |<----- H ----->|<-- K -->|<-- K -->|  heads of qkv; the first H + K turn together
    heads_THD = qkv_TN.view(num_tokens, num_query_heads + 2 * num_kv_heads, head_size)
    q_THD = heads_THD[:, :num_query_heads]
    k_TKD = heads_THD[:, num_query_heads : num_query_heads + num_kv_heads]
    v_TKD = heads_THD[:, num_query_heads + num_kv_heads :]
    if q_norm_weight_D is not None:
        q_THD.copy_(rms_norm(q_THD, q_norm_weight_D, norm_eps))
    if k_norm_weight_D is not None:
        k_TKD.copy_(rms_norm(k_TKD, k_norm_weight_D, norm_eps))
    half = cos_sin_PD.shape[1] // 2
    angles_T1D = cos_sin_PD.index_select(0, positions_T).unsqueeze(1)
    cos, sin = angles_T1D[..., :half], angles_T1D[..., half:]
    turning = heads_THD[:, : num_query_heads + num_kv_heads]
    left, right = turning[..., :half], turning[..., half : 2 * half]
    left_before_sin = left * sin
    left.mul_(cos).addcmul_(right, sin, value=-1)
    right.mul_(cos).add_(left_before_sin)
    write_kv_cache(k_TKD, v_TKD, kv_cache, slot_mapping_T)
    return q_THD
