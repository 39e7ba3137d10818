"""Weights of 8 and 4 bits widened to floating numbers: in registers for products, or to memory.

Owns the reading of the packed layout on the device (`quantised_weights` says what it is). Must not
know products.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.quantised_weights import QuantisedWeight

BLOCK_N = 64
BLOCK_J = 64
"""Outputs, and bytes of each, that are read at a time."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What weights are widened to."""


@triton.jit
def load_scaled(
    packed_ptr,  # uint8 or int8 [N, J]
    scales_ptr,  # [N, G]
    offsets_ptr,  # [N, G]; unused without HAS_OFFSETS
    n_N,  # int64 [BLOCK_N]
    j_start,
    N: tl.constexpr,
    J: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_J: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    IN_BOUNDS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """Bytes [j_start, j_start + BLOCK_J) of some rows: (low, high) float32 [BLOCK_N, BLOCK_J].

    int8 has no high half. GROUP_J is the bytes of a group: groups are whole numbers of blocks, or
    blocks of groups. IN_BOUNDS says that no block reaches beyond N or J.
    """
    GROUPS: tl.constexpr = BLOCK_J // GROUP_J if GROUP_J < BLOCK_J else 1
    ROW_GROUPS: tl.constexpr = J // GROUP_J
    j_J = j_start + tl.arange(0, BLOCK_J)
    g_G = j_start // GROUP_J + tl.arange(0, GROUPS)
    at_NJ = packed_ptr + n_N[:, None] * J + j_J[None, :]
    if IN_BOUNDS:
        bytes_NJ = tl.load(at_NJ)
    else:
        bytes_NJ = tl.load(at_NJ, mask=(n_N < N)[:, None] & (j_J < J)[None, :], other=0)
    at_NG = n_N[:, None] * ROW_GROUPS + g_G[None, :]
    live_NG = (n_N < N)[:, None] & (g_G < ROW_GROUPS)[None, :]
    scale_NG1 = tl.load(scales_ptr + at_NG, mask=live_NG, other=0.0).to(tl.float32)[:, :, None]
    if HAS_OFFSETS:
        offset_NG = tl.load(offsets_ptr + at_NG, mask=live_NG, other=0.0).to(tl.float32)
        offset_NG1 = offset_NG[:, :, None]
    bytes_NGI = tl.reshape(bytes_NJ, (BLOCK_N, GROUPS, BLOCK_J // GROUPS))
    if BITS == 8:
        low_NGI = bytes_NGI.to(tl.float32) * scale_NG1
        high_NGI = low_NGI
    elif HAS_OFFSETS:
        low_NGI = (bytes_NGI & 15).to(tl.float32) * scale_NG1
        high_NGI = (bytes_NGI >> 4).to(tl.float32) * scale_NG1
    else:
        low_NGI = ((bytes_NGI & 15).to(tl.float32) - 8.0) * scale_NG1
        high_NGI = ((bytes_NGI >> 4).to(tl.float32) - 8.0) * scale_NG1
    if HAS_OFFSETS:
        low_NGI = low_NGI + offset_NG1
        high_NGI = high_NGI + offset_NG1
    low_NJ = tl.reshape(low_NGI, (BLOCK_N, BLOCK_J))
    high_NJ = tl.reshape(high_NGI, (BLOCK_N, BLOCK_J))
    return low_NJ, high_NJ


@triton.jit
def _dequantise_kernel(
    packed_ptr,  # uint8 or int8 [N, J]
    scales_ptr,  # [N, G]
    offsets_ptr,  # [N, G]; unused without HAS_OFFSETS
    out_ptr,  # [N, K]
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    J: tl.constexpr = K * BITS // 8
    n_N = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    j_start = tl.program_id(1) * BLOCK_J
    low_NJ, high_NJ = load_scaled(
        packed_ptr,
        scales_ptr,
        offsets_ptr,
        n_N,
        j_start,
        N,
        J,
        BITS,
        GROUP * BITS // 8,
        HAS_OFFSETS,
        N % BLOCK_N == 0 and J % BLOCK_J == 0,
        BLOCK_N,
        BLOCK_J,
    )
    j_J = j_start + tl.arange(0, BLOCK_J)
    k_J = j_J if BITS == 8 else j_J // 16 * 32 + j_J % 16
    out_NJ = out_ptr + n_N[:, None] * K + k_J[None, :]
    keep_NJ = (n_N < N)[:, None] & (j_J < J)[None, :]
    tl.store(out_NJ, low_NJ.to(out_ptr.dtype.element_ty), mask=keep_NJ)
    if BITS == 4:
        tl.store(out_NJ + 16, high_NJ.to(out_ptr.dtype.element_ty), mask=keep_NJ)


def dequantise_to(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight widened on its device, [N, E] in `dtype`: `quantised_weights.dequantise`, rounded.

    Raises:
        TypeError: not float32, float16 or bfloat16.
    """
    if dtype not in DTYPES:
        raise TypeError(f"cannot widen to {dtype}; give one of {DTYPES}")
    packed_NJ = weight.packed_NJ
    w_NE = torch.empty(weight.num_outputs, weight.num_inputs, dtype=dtype, device=packed_NJ.device)
    blocks_n = triton.cdiv(weight.num_outputs, BLOCK_N)
    _dequantise_kernel[(blocks_n, triton.cdiv(packed_NJ.shape[1], BLOCK_J))](
        packed_NJ,
        weight.scales_NG,
        weight.offsets_NG,
        w_NE,
        **weight_constants(weight),
        num_warps=4,
    )
    if weight.input_order_E is None:
        return w_NE
    in_order_NE = torch.empty_like(w_NE)
    return in_order_NE.index_copy_(1, weight.input_order_E, w_NE)


def weight_constants(weight: QuantisedWeight) -> dict[str, Any]:
    """What every kernel that reads a weight is compiled for."""
    block_j = BLOCK_J
    # one group a row may be of any length; then its one scale serves every block
    group_size = weight.group_size
    group_j = group_size * weight.num_bits // 8
    assert group_j % block_j == 0 or block_j % group_j == 0 or group_size == weight.num_inputs
    return {
        "N": weight.num_outputs,
        "K": weight.num_inputs,
        "BITS": weight.num_bits,
        "GROUP": group_size,
        "HAS_OFFSETS": weight.offsets_NG is not None,
        "BLOCK_N": BLOCK_N,
        "BLOCK_J": block_j,
    }
