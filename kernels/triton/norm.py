"""RMS norm (arXiv:1910.07467), with the residual's addition before it and quantisation after it.

One program holds one row in registers: it reads all inputs before it writes, and the row's bits
depend on that row alone."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.torch.elementwise import rms_norm as torch_rms_norm
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.quantised import QUANTISED_MAX, quantise, quantise_rows_reference, row_scale
from kernels.triton.tensor_checks import FLOATS, check_tensor

_MOST_COLUMNS = 32768
"""Of a row that stays in registers."""

Quantised = tuple[torch.Tensor, torch.Tensor]
"""(values [T, E] float8_e4m3fn or int8, float32 scales [T])."""


def add_rms_norm_reference(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual), in torch; changes nothing."""
    summed_TE = residual_TE + x_TE
    return torch_rms_norm(summed_TE, weight_E, eps), summed_TE


def rms_norm_quantised_reference(
    x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, dtype: torch.dtype
) -> Quantised:
    """The norm rounded to x's dtype, then quantised a row at a time, in torch."""
    return quantise_rows_reference(torch_rms_norm(x_TE, weight_E, eps), dtype)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E], if HAS_RESIDUAL: overwritten with residual + x
    weight_ptr,  # [E]
    out_ptr,  # [T, E], may be x_ptr
    scales_ptr,  # float32 [T], if IS_QUANTISED
    eps,
    x_stride_t,
    residual_stride_t,
    out_stride_t,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_QUANTISED: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    middle: tl.constexpr = weight_ptr.dtype.element_ty
    stored: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column_E = tl.arange(0, BLOCK_E)
    is_inside_E = column_E < E
    # loaded first, so that it is under way together with the row
    weight_E = tl.load(weight_ptr + column_E, mask=is_inside_E, other=0.0).to(tl.float32)
    x_E = tl.load(x_ptr + row * x_stride_t + column_E, mask=is_inside_E, other=0.0)
    x_E = x_E.to(tl.float32)
    if HAS_RESIDUAL:
        residual_at = residual_ptr + row * residual_stride_t + column_E
        residual_E = tl.load(residual_at, mask=is_inside_E, other=0.0).to(tl.float32)
        summed_E = (residual_E + x_E).to(dtype)
        tl.store(residual_at, summed_E, mask=is_inside_E)
        x_E = summed_E.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x_E * x_E, axis=0) / E + eps)
    normed_E = (x_E * inverse).to(middle).to(tl.float32)
    out_E = (normed_E * weight_E).to(middle).to(tl.float32).to(dtype)
    inverse_scale = 1.0
    if IS_QUANTISED:
        peak = tl.max(tl.abs(out_E.to(tl.float32)), axis=0)
        scale, inverse_scale = row_scale(peak, stored)
        tl.store(scales_ptr + row, scale)
    out_E = quantise(out_E, inverse_scale, stored)
    tl.store(out_ptr + row * out_stride_t + column_E, out_E, mask=is_inside_E)


def rms_norm(
    x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float, *, out_TE: torch.Tensor | None = None
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in float32.

    Rounded where `Operations.rms_norm` says. Returns `out_TE`.

    Args:
        x_TE: rows contiguous, E <= 32768; float32, float16 or bfloat16. Not changed.
        weight_E: x's dtype or float32.
        out_TE: like x_TE; may be x_TE itself. None: a new tensor.
    """
    out_TE = torch.empty_like(x_TE) if out_TE is None else out_TE
    _launch(x_TE, None, weight_E, eps, out_TE, None)
    return out_TE


def add_rms_norm(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    *,
    out_TE: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual += x`, rounded to its dtype, and the `rms_norm` of that.

    Args: see `rms_norm`.
        residual_TE: like x_TE, overwritten with the sum.
        out_TE: None: the norm overwrites x_TE.

    Returns:
        (out_TE, residual_TE), the tensors given.
    """
    out_TE = x_TE if out_TE is None else out_TE
    _launch(x_TE, residual_TE, weight_E, eps, out_TE, None)
    return out_TE, residual_TE


def rms_norm_quantised(
    x_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    *,
    residual_TE: torch.Tensor | None = None,
) -> Quantised:
    """`rms_norm`, or `add_rms_norm` if a residual is given, then a scale for each row.

        scale = max(|normed|) / 448 (fp8) or / 127 (int8);   values = round(normed / scale)

    The norm is rounded to x's dtype first, so that the values are those of quantising afterwards.

    Args: see `rms_norm` and `add_rms_norm`.
        dtype: torch.float8_e4m3fn or torch.int8.

    Returns:
        (values_TE, scales_T), new tensors.
    """
    if dtype not in QUANTISED_MAX:
        raise ValueError(f"cannot quantise to {dtype}; choose float8_e4m3fn or int8")
    out_TE = torch.empty(x_TE.shape, dtype=dtype, device=x_TE.device)
    scales_T = torch.empty(x_TE.shape[0], dtype=torch.float32, device=x_TE.device)
    _launch(x_TE, residual_TE, weight_E, eps, out_TE, scales_T)
    return out_TE, scales_T


def _launch(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out_TE: torch.Tensor,
    scales_T: torch.Tensor | None,
) -> None:
    tensors = (
        x_TE,
        x_TE if residual_TE is None else residual_TE,
        weight_E,
        out_TE,
        weight_E if scales_T is None else scales_T,
    )
    options = (eps, residual_TE is None, scales_T is None)
    if x_TE.numel():
        _launches(
            tensors,
            options,
            lambda: _checked_launch(x_TE, residual_TE, weight_E, eps, out_TE, scales_T),
        )
    else:
        _checked_launch(x_TE, residual_TE, weight_E, eps, out_TE, scales_T)


_launches = BoundLaunches(rms_norm_kernel)


def _checked_launch(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out_TE: torch.Tensor,
    scales_T: torch.Tensor | None,
) -> Launch:
    if x_TE.dim() != 2:
        raise ValueError(f"x_TE has {x_TE.dim()} dimensions; flatten it to [T, E]")
    E = x_TE.shape[1]
    if not 0 < E <= _MOST_COLUMNS:
        raise ValueError(f"a row has {E} elements, this kernel takes 1 to {_MOST_COLUMNS}")
    own = (x_TE.dtype,)
    device = x_TE.device
    check_tensor("x_TE", x_TE, x_TE.shape, FLOATS, device, contiguous_dims=1)
    check_tensor("weight_E", weight_E, (E,), (x_TE.dtype, torch.float32), device)
    if residual_TE is not None:
        check_tensor("residual_TE", residual_TE, x_TE.shape, own, device, contiguous_dims=1)
    out_dtypes = own if scales_T is None else tuple(QUANTISED_MAX)
    check_tensor("out_TE", out_TE, x_TE.shape, out_dtypes, device, contiguous_dims=1)
    strides = [each.stride(0) for each in (x_TE, x_TE if residual_TE is None else residual_TE)]
    return Launch(
        (x_TE.shape[0],),
        (eps, *strides, out_TE.stride(0)),
        {
            "HAS_RESIDUAL": residual_TE is not None,
            "IS_QUANTISED": scales_T is not None,
            **_constants(E),
            **dependent_launch(device),
            "num_warps": _num_warps(E),
        },
    )


def _constants(E: int) -> dict[str, Any]:
    return {"E": E, "BLOCK_E": triton.next_power_of_2(E)}


def _num_warps(E: int) -> int:
    """A function of E alone: more warps would add in another order."""
    return min(16, max(1, int(triton.next_power_of_2(E)) // 256))
