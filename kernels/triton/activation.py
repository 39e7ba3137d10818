"""Gated activations (arXiv:2002.05202; SiLU and GELU: arXiv:1606.08415), rounded to float8 or not.

GELU's tanh comes from the logistic function: 1 + tanh(u) = 2 / (1 + exp(-2u)), exact near zero."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.fp8_rounding import (
    SCALE_STRIDES,
    empty_rounded,
    quantise,
    round_and_store,
    rounding_constants,
    row_scale,
)
from kernels.triton.tensor_checks import FLOATS, check_tensor

BLOCK_SIZE_F = 1024
_BLOCK_F_OF_ROWS = 4096
"""Columns a program, and columns a turn of the program that rounds a whole row."""


@triton.jit
def _logit(gate, IS_GELU: tl.constexpr):
    """What `gate` is multiplied with the logistic function of: itself, or GELU's polynomial."""
    if IS_GELU:
        return 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # of 2 * sqrt(2 / pi)
    return gate


@triton.jit
def gate_times_up(gate, up, dtype: tl.constexpr, IS_GELU: tl.constexpr):
    """`activation(gate) * up` of float32, both rounded to the dtype."""
    active = (gate / (1.0 + tl.exp(-_logit(gate, IS_GELU)))).to(dtype).to(tl.float32)
    return (active * up).to(dtype)


@triton.jit
def _gated(row_ptr, column_F, is_inside_F, F: tl.constexpr, IS_GELU: tl.constexpr):
    """`activation(gate) * up` [BLOCK_F], both rounded to the dtype of the row as torch does."""
    gate_F = tl.load(row_ptr + column_F, mask=is_inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(row_ptr + F + column_F, mask=is_inside_F, other=0.0).to(tl.float32)
    return gate_times_up(gate_F, up_F, row_ptr.dtype.element_ty, IS_GELU)


@triton.jit
def gated_expert(gate, up, CLAMPED: tl.constexpr, IS_GELU: tl.constexpr):
    """silu(gate) * up, or GELU's, in float32; CLAMPED: swiglu_oai of `ExpertActivation`."""
    if CLAMPED:
        gate = tl.minimum(gate, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    return gate / (1.0 + tl.exp(-_logit(gate, IS_GELU))) * up


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


@triton.jit(do_not_specialize_on_alignment=SCALE_STRIDES)
def activation_rounded_kernel(
    gate_up_ptr,  # [T, 2F]
    out_ptr,  # float8_e4m3fn [T, F]
    scales_ptr,  # float32 [T, scales of a row]
    given_ptr,  # float32 [1], if IS_GIVEN
    gate_up_stride_t,
    scale_stride_t,
    scale_stride_g,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    IS_GELU: tl.constexpr,
    ROUNDS: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    GROUP: tl.constexpr,  # 0: a row has one scale
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    row_ptr = gate_up_ptr + row * gate_up_stride_t
    out_ptr += row * F
    if IS_GIVEN or GROUP or F <= BLOCK_F:
        start = tl.program_id(1) * BLOCK_F
        column_F = start + tl.arange(0, BLOCK_F)
        gated_F = _gated(row_ptr, column_F, column_F < F, F, IS_GELU)
        round_and_store(
            gated_F, start, out_ptr, scales_ptr + row * scale_stride_t, scale_stride_g, given_ptr,
            F, IS_GIVEN, BLOCK_F, GROUP,
        )  # fmt: skip
    else:
        peak_F = tl.zeros([BLOCK_F], tl.float32)
        for start in range(0, F, BLOCK_F):
            column_F = start + tl.arange(0, BLOCK_F)
            gated_F = _gated(row_ptr, column_F, column_F < F, F, IS_GELU)
            peak_F = tl.maximum(peak_F, tl.abs(gated_F.to(tl.float32)))
        scale, inverse_scale = row_scale(tl.max(peak_F, axis=0))
        tl.store(scales_ptr + row, scale)
        # a second reading, out of the L2 cache, is cheaper than a row in registers
        for start in range(0, F, BLOCK_F):
            column_F = start + tl.arange(0, BLOCK_F)
            gated_F = _gated(row_ptr, column_F, column_F < F, F, IS_GELU)
            values_F = quantise(gated_F, inverse_scale, out_ptr.dtype.element_ty)
            tl.store(out_ptr + column_F, values_F, mask=column_F < F)


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


def gated_rounded(
    gate_up_TF2: torch.Tensor,
    *,
    is_gelu: bool = False,
    grouped: bool = False,
    given: torch.Tensor | None = None,
    in_columns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantise_rows` of `silu_and_mul`, or of `gelu_tanh_and_mul`, bit for bit; see these."""
    num_rows, width = _checked_shape(gate_up_TF2) if gate_up_TF2.dim() != 2 else gate_up_TF2.shape
    codes_TF, scales_TG = empty_rounded(
        num_rows, width // 2, gate_up_TF2.device, grouped=grouped, in_columns=in_columns
    )
    tensors = (gate_up_TF2, codes_TF, scales_TG, scales_TG if given is None else given)

    def prepare() -> Launch:
        T, F = _checked_shape(gate_up_TF2)
        if given is not None:
            check_tensor("given", given, (1,), torch.float32, gate_up_TF2.device)
        rounding = rounding_constants(scales_TG, given)
        constants = rounded_constants(F, rounding, is_gelu=is_gelu)
        block = constants["BLOCK_F"]
        constants |= {**dependent_launch(gate_up_TF2.device), "num_warps": num_warps_of(block)}
        num_programs = 1 if _has_whole_rows(rounding) else triton.cdiv(F, block)
        return Launch((T, num_programs), (gate_up_TF2.stride(0), *scales_TG.stride()), constants)

    if num_rows:
        _rounded_launches(tensors, (is_gelu, given is None), prepare)
    return codes_TF, scales_TG


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
_rounded_launches = BoundLaunches(activation_rounded_kernel)


def _checked_launch(gate_up_TF2: torch.Tensor, out_TF: torch.Tensor, *, is_gelu: bool) -> Launch:
    T, F = _checked_shape(gate_up_TF2)
    dtype, device = gate_up_TF2.dtype, gate_up_TF2.device
    check_tensor("out_TF", out_TF, (T, F), dtype, device, contiguous_dims=1)
    constants = {
        **constants_of(F, BLOCK_SIZE_F, is_gelu),
        **dependent_launch(device),
        "num_warps": 4,
    }
    grid = (T, triton.cdiv(F, BLOCK_SIZE_F))
    return Launch(grid, (gate_up_TF2.stride(0), out_TF.stride(0)), constants)


def _checked_shape(gate_up_TF2: torch.Tensor) -> tuple[int, int]:
    if gate_up_TF2.dim() != 2 or gate_up_TF2.shape[1] % 2 or not gate_up_TF2.shape[1]:
        raise ValueError(
            f"gate_up_TF2 has shape {list(gate_up_TF2.shape)}; make it [T, 2F], F at least 1"
        )
    shape, device = gate_up_TF2.shape, gate_up_TF2.device
    check_tensor("gate_up_TF2", gate_up_TF2, shape, FLOATS, device, contiguous_dims=1)
    return shape[0], shape[1] // 2


def constants_of(F: int, most: int, is_gelu: bool) -> dict[str, Any]:
    block = min(most, int(triton.next_power_of_2(F)))
    return {"F": F, "BLOCK_F": block, "IS_GELU": is_gelu}


def _has_whole_rows(rounding: Mapping[str, Any]) -> bool:
    """Whether a row is one program's: its scale follows from all of it."""
    return not (rounding["GROUP"] or rounding["IS_GIVEN"])


def rounded_constants(F: int, rounding: Mapping[str, Any], *, is_gelu: bool) -> dict[str, Any]:
    """Of `activation_rounded_kernel`. `rounding`: `rounding_constants`."""
    most = _BLOCK_F_OF_ROWS if _has_whole_rows(rounding) else BLOCK_SIZE_F
    return {**constants_of(F, most, is_gelu), **rounding}


def num_warps_of(block: int) -> int:
    return min(16, max(1, block // 256))
