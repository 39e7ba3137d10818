"""What the kernel of `kernels.triton.rotary_cache` computes, in torch.

Owns the specification of rotation, cache layout and fp8 on this backend; it agrees bit for bit
with `kernels.torch.kv_cache` where both apply. Must not know Triton.
"""

from __future__ import annotations

import torch

from kernels.interface.operations import KVCache, RotaryParams
from kernels.torch.elementwise import rms_norm
from kernels.triton.quantised import quantise_reference


def rotary_and_cache_reference(
    qkv_TN: torch.Tensor,
    positions_T: torch.Tensor,
    slot_mapping_T: torch.Tensor,
    kv_cache: KVCache,
    params: RotaryParams,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """What `rotary_and_cache` computes, in torch; changes the caches only. Returns q_THD.

    Agrees bit for bit with `kernels.torch.kv_cache` where both apply.
    """
    k_cache_BKSD, v_cache_BKSD = kv_cache
    block_size, num_kv_heads = k_cache_BKSD.shape[2], k_cache_BKSD.shape[1]
    num_query_heads, head_size, cos_sin_PD = (
        params.num_query_heads,
        params.head_size,
        params.cos_sin_PD,
    )
    heads_THD = qkv_TN.clone().view(qkv_TN.shape[0], -1, head_size)
    q_THD, k_v_THD = heads_THD[:, :num_query_heads], heads_THD[:, num_query_heads:]
    k_TKD, v_TKD = k_v_THD[:, :num_kv_heads], k_v_THD[:, num_kv_heads:]
    real_T = slot_mapping_T >= 0
    half = cos_sin_PD.shape[1] // 2
    angles_T1D = cos_sin_PD[torch.where(real_T, positions_T, 0)].unsqueeze(1)
    cos, sin = angles_T1D[..., :half], angles_T1D[..., half:]
    for part_THD, weight_D in ((q_THD, params.q_norm_weight_D), (k_TKD, params.k_norm_weight_D)):
        if weight_D is not None:
            part_THD.copy_(rms_norm(part_THD, weight_D, params.norm_eps))
        left, right = part_THD[..., :half], part_THD[..., half : 2 * half]
        left_before_sin = left * sin
        left.mul_(cos).addcmul_(right, sin, value=-1)
        right.mul_(cos).add_(left_before_sin)
    slots_N = slot_mapping_T[real_T]
    blocks_N, offsets_N = slots_N // block_size, slots_N % block_size
    for part_TKD, cache_BKSD, scale in (
        (k_TKD, k_cache_BKSD, k_scale),
        (v_TKD, v_cache_BKSD, v_scale),
    ):
        written_NKD = part_TKD[real_T]
        if cache_BKSD.dtype == torch.float8_e4m3fn:
            written_NKD = quantise_reference(written_NKD, 1.0 / scale).view(torch.uint8)
            cache_BKSD = cache_BKSD.view(torch.uint8)
        cache_BKSD[blocks_N, :, offsets_N] = written_NKD
    q_out_THD = qkv_TN.clone().view(qkv_TN.shape[0], -1, head_size)[:, :num_query_heads]
    q_out_THD[real_T] = q_THD[real_T]
    return q_out_THD
