"""Gated activations (arXiv:2002.05202; SiLU and GELU: arXiv:1606.08415), quantised or not.

GELU's tanh comes from the logistic function: 1 + tanh(u) = 2 / (1 + exp(-2u)), exact near zero."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.torch import elementwise
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.quantised import QUANTISED_MAX, quantise, quantise_rows_reference, row_scale
from kernels.triton.tensor_checks import FLOATS, check_tensor

_BLOCK_F = 1024
_BLOCK_F_QUANTISED = 4096
"""Columns a program, and columns a turn of the program that quantises a whole row."""


def activation_quantised_reference(
    gate_up_TF2: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul` rounded to its dtype, then quantised a row at a time, in torch.

    The unquantised reference is `kernels.torch.elementwise`."""
    return quantise_rows_reference(elementwise.silu_and_mul(gate_up_TF2), dtype)


@triton.jit
def _gated(row_ptr, column_F, is_inside_F, F: tl.constexpr, IS_GELU: tl.constexpr):
    """`activation(gate) * up` [BLOCK_F], both rounded to the dtype of the row as torch does."""
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    gate_F = tl.load(row_ptr + column_F, mask=is_inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(row_ptr + F + column_F, mask=is_inside_F, other=0.0).to(tl.float32)
    if IS_GELU:
        # 2 * sqrt(2 / pi) * (x + 0.044715 x^3)
        inner_F = 1.5957691216057308 * (gate_F + 0.044715 * gate_F * gate_F * gate_F)
    else:
        inner_F = gate_F
    active_F = (gate_F / (1.0 + tl.exp(-inner_F))).to(dtype).to(tl.float32)
    return (active_F * up_F).to(dtype)


@triton.jit
def activation_kernel(
    gate_up_ptr,  # [T, 2F]
    out_ptr,  # [T, F]
    gate_up_stride_t,
    out_stride_t,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_GELU: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column_F = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    is_inside_F = column_F < F
    out_F = _gated(gate_up_ptr + row * gate_up_stride_t, column_F, is_inside_F, F, IS_GELU)
    tl.store(out_ptr + row * out_stride_t + column_F, out_F, mask=is_inside_F)


@triton.jit
def activation_quantised_kernel(
    gate_up_ptr,  # [T, 2F]
    out_ptr,  # float8_e4m3fn or int8 [T, F]
    scales_ptr,  # float32 [T]
    gate_up_stride_t,
    out_stride_t,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_GELU: tl.constexpr,
):
    stored: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    row_ptr = gate_up_ptr + row * gate_up_stride_t
    peak_F = tl.zeros([BLOCK_F], tl.float32)
    for start in range(0, F, BLOCK_F):
        column_F = start + tl.arange(0, BLOCK_F)
        gated_F = _gated(row_ptr, column_F, column_F < F, F, IS_GELU)
        peak_F = tl.maximum(peak_F, tl.abs(gated_F.to(tl.float32)))
    scale, inverse_scale = row_scale(tl.max(peak_F, axis=0), stored)
    tl.store(scales_ptr + row, scale)
    # a second reading, out of the L2 cache, is cheaper than a row in registers
    for start in range(0, F, BLOCK_F):
        column_F = start + tl.arange(0, BLOCK_F)
        gated_F = _gated(row_ptr, column_F, column_F < F, F, IS_GELU)
        values_F = quantise(gated_F, inverse_scale, stored)
        tl.store(out_ptr + row * out_stride_t + column_F, values_F, mask=column_F < F)


def silu_and_mul(gate_up_TF2: torch.Tensor, *, out_TF: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(left half) * right half` of [T, 2F] -> [T, F], with `silu(x) = x / (1 + exp(-x))`.

    Computed in float32; silu and the product are each rounded to the argument's dtype.
    Returns `out_TF`.

    Args:
        gate_up_TF2: float32, float16 or bfloat16, rows contiguous. Not changed.
        out_TF: [T, F], rows contiguous, no part of gate_up_TF2. None: a new tensor.
    """
    return _launch(gate_up_TF2, out_TF, is_gelu=False)


def gelu_tanh_and_mul(
    gate_up_TF2: torch.Tensor, *, out_TF: torch.Tensor | None = None
) -> torch.Tensor:
    """`gelu(left half) * right half` of [T, 2F] -> [T, F], with the tanh approximation.

        gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))

    Otherwise as `silu_and_mul`."""
    return _launch(gate_up_TF2, out_TF, is_gelu=True)


def silu_and_mul_quantised(
    gate_up_TF2: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul`, then a scale for each row.

        scale = max(|row|) / 448 (fp8) or / 127 (int8);   values = round(row / scale)

    Args: see `silu_and_mul`.
        dtype: torch.float8_e4m3fn or torch.int8.

    Returns:
        (values_TF of `dtype`, float32 scales_T), new tensors.
    """
    T, F = _checked_shape(gate_up_TF2)
    if dtype not in QUANTISED_MAX:
        raise ValueError(f"cannot quantise to {dtype}; choose float8_e4m3fn or int8")
    out_TF = torch.empty((T, F), dtype=dtype, device=gate_up_TF2.device)
    scales_T = torch.empty(T, dtype=torch.float32, device=gate_up_TF2.device)
    if T:
        constants = _constants(F, _BLOCK_F_QUANTISED, False)
        activation_quantised_kernel[(T,)](
            gate_up_TF2,
            out_TF,
            scales_T,
            gate_up_TF2.stride(0),
            out_TF.stride(0),
            **constants,
            num_warps=_num_warps(constants["BLOCK_F"]),
        )
    return out_TF, scales_T


def _launch(
    gate_up_TF2: torch.Tensor, out_TF: torch.Tensor | None, *, is_gelu: bool
) -> torch.Tensor:
    if out_TF is None:
        T, width = gate_up_TF2.shape if gate_up_TF2.dim() == 2 else _checked_shape(gate_up_TF2)
        shape = (T, width // 2)
        out_TF = torch.empty(shape, dtype=gate_up_TF2.dtype, device=gate_up_TF2.device)
    tensors = (gate_up_TF2, out_TF)
    if gate_up_TF2.numel():
        _launches(tensors, is_gelu, lambda: _checked_launch(*tensors, is_gelu=is_gelu))
    else:
        _checked_launch(*tensors, is_gelu=is_gelu)
    return out_TF


_launches = BoundLaunches(activation_kernel)


def _checked_launch(gate_up_TF2: torch.Tensor, out_TF: torch.Tensor, *, is_gelu: bool) -> Launch:
    T, F = _checked_shape(gate_up_TF2)
    dtype, device = gate_up_TF2.dtype, gate_up_TF2.device
    check_tensor("out_TF", out_TF, (T, F), dtype, device, contiguous_dims=1)
    constants = {**_constants(F, _BLOCK_F, is_gelu), **dependent_launch(device), "num_warps": 4}
    grid = (T, triton.cdiv(F, _BLOCK_F))
    return Launch(grid, (gate_up_TF2.stride(0), out_TF.stride(0)), constants)


def _checked_shape(gate_up_TF2: torch.Tensor) -> tuple[int, int]:
    if gate_up_TF2.dim() != 2 or gate_up_TF2.shape[1] % 2 or not gate_up_TF2.shape[1]:
        raise ValueError(
            f"gate_up_TF2 has shape {list(gate_up_TF2.shape)}; make it [T, 2F], F at least 1"
        )
    shape, device = gate_up_TF2.shape, gate_up_TF2.device
    check_tensor("gate_up_TF2", gate_up_TF2, shape, FLOATS, device, contiguous_dims=1)
    return shape[0], shape[1] // 2


def _constants(F: int, most: int, is_gelu: bool) -> dict[str, Any]:
    block = min(most, int(triton.next_power_of_2(F)))
    return {"F": F, "BLOCK_F": block, "IS_GELU": is_gelu}


def _num_warps(block: int) -> int:
    return min(16, max(1, block // 256))
