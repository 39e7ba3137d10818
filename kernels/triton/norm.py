"""RMS norm (arXiv:1910.07467), with the residual's addition before it and rounding to float8
after it.

One program holds one row in registers: it reads all inputs before it writes, and the row's bits
depend on that row alone."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.torch.elementwise import rms_norm as torch_rms_norm
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.fp8_rounding import (
    SCALE_STRIDES,
    empty_rounded,
    round_and_store,
    rounding_constants,
)
from kernels.triton.tensor_checks import FLOATS, check_tensor

_MOST_COLUMNS = 32768
"""Most columns of a row that stays in registers."""


def add_rms_norm_reference(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, new residual), in torch; changes nothing."""
    summed_TE = residual_TE + x_TE
    return torch_rms_norm(summed_TE, weight_E, eps), summed_TE


@triton.jit(do_not_specialize_on_alignment=SCALE_STRIDES)
def rms_norm_kernel(
    x_ptr,  # [T, E]
    residual_ptr,  # [T, E], if HAS_RESIDUAL: overwritten with residual + x
    weight_ptr,  # [E]
    out_ptr,  # [T, E], may be x_ptr; float8_e4m3fn if ROUNDS
    scales_ptr,  # float32 [T, scales of a row], if ROUNDS
    given_ptr,  # float32 [1], if IS_GIVEN
    eps,
    x_stride_t,
    residual_stride_t,
    out_stride_t,
    scale_stride_t,
    scale_stride_g,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    GROUP: tl.constexpr,  # 0: a row has one scale
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    middle: tl.constexpr = weight_ptr.dtype.element_ty
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
    if ROUNDS:
        round_and_store(
            out_E,
            0,
            out_ptr + row * out_stride_t,
            scales_ptr + row * scale_stride_t,
            scale_stride_g,
            given_ptr,
            E,
            IS_GIVEN,
            BLOCK_E,
            GROUP,
        )
    else:
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
    _launch(x_TE, None, weight_E, eps, out_TE)
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
    _launch(x_TE, residual_TE, weight_E, eps, out_TE)
    return out_TE, residual_TE


def add_rms_norm_rounded(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    *,
    grouped: bool = False,
    given: torch.Tensor | None = None,
    in_columns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise_rows` of `add_rms_norm`, bit for bit; see both."""
    num_tokens, width = x_TE.shape
    codes_TE, scales_TG = empty_rounded(
        num_tokens, width, x_TE.device, grouped=grouped, in_columns=in_columns
    )
    _launch(x_TE, residual_TE, weight_E, eps, codes_TE, scales_TG, given)
    return codes_TE, scales_TG


def _launch(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out_TE: torch.Tensor,
    scales_TG: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
) -> None:
    arguments = (x_TE, residual_TE, weight_E, eps, out_TE, scales_TG, given)
    tensors = (
        x_TE,
        x_TE if residual_TE is None else residual_TE,
        weight_E,
        out_TE,
        weight_E if scales_TG is None else scales_TG,
        weight_E if given is None else given,
    )
    options = (eps, residual_TE is None, scales_TG is None, given is None)
    if x_TE.numel():
        _launches(tensors, options, lambda: _checked_launch(*arguments))
    else:
        _checked_launch(*arguments)


_launches = BoundLaunches(rms_norm_kernel)


def _checked_launch(
    x_TE: torch.Tensor,
    residual_TE: torch.Tensor | None,
    weight_E: torch.Tensor,
    eps: float,
    out_TE: torch.Tensor,
    scales_TG: torch.Tensor | None,
    given: torch.Tensor | None,
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
    out_dtypes = own if scales_TG is None else (torch.float8_e4m3fn,)
    check_tensor("out_TE", out_TE, x_TE.shape, out_dtypes, device, contiguous_dims=1)
    if given is not None:
        check_tensor("given", given, (1,), torch.float32, device)
    strides = [each.stride(0) for each in (x_TE, x_TE if residual_TE is None else residual_TE)]
    of_scales = (1, 1) if scales_TG is None else scales_TG.stride()
    return Launch(
        (x_TE.shape[0],),
        (eps, *strides, out_TE.stride(0), *of_scales),
        {
            "HAS_RESIDUAL": residual_TE is not None,
            **rounding_constants(scales_TG, given),
            **constants_of(E),
            **dependent_launch(device),
            "num_warps": num_warps_of(E),
        },
    )


def constants_of(E: int) -> dict[str, Any]:
    return {"E": E, "BLOCK_E": triton.next_power_of_2(E)}


def num_warps_of(E: int) -> int:
    """A function of E alone: more warps would add in another order."""
    return min(16, max(1, int(triton.next_power_of_2(E)) // 256))
