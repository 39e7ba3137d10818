"""Rounding to float8_e4m3fn, ties to even: alone, and for kernels that write such values.

scale = max(|x|, MIN_PEAK) / 448 over the numbers that share it;  value = clamp(x / scale)."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.device_limits import dependent_launch
from kernels.triton.tensor_checks import FLOATS, check_tensor

FP8_MAX = 448.0
MIN_PEAK = 2.0**-64
GROUP = 128
"""Numbers that share a scale where rows have several."""
ROWS_OF_COLUMNS = 4
"""Scales in columns have room for a multiple of so many rows: cuBLAS reads 16 bytes at a time."""

SCALE_STRIDES = ("scale_stride_t", "scale_stride_g")
"""Of kernels that write scales: one of them is 1, the other is not compiled in."""
_MOST_AT_ONCE = 4096
_GROUPS_AT_ONCE = 16


def reference_quantise_rows(
    x_TE: torch.Tensor, *, grouped: bool = False, given: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `quantise_rows`."""
    x_TGI = x_TE.float().unflatten(1, (-1, GROUP if grouped else x_TE.shape[1]))
    peak_TG = x_TGI.abs().amax(dim=2).clamp(min=MIN_PEAK)
    if given is not None:
        peak_TG = (given * FP8_MAX).expand(peak_TG.shape)
    # of two tensors: torch divides a number by a tensor in two roundings
    inverse_TG = torch.full_like(peak_TG, FP8_MAX) / peak_TG
    q_TGI = (x_TGI * inverse_TG[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return q_TGI.flatten(1).to(torch.float8_e4m3fn), peak_TG / FP8_MAX


def quantise_reference(x: torch.Tensor) -> torch.Tensor:
    """`x` as float8_e4m3fn, clamped, in torch."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


@triton.jit
def quantise(x, inverse_scale, dtype: tl.constexpr):
    """`x * inverse_scale` as tl.float8e4nv; `x` as it is for any other dtype."""
    if dtype == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        # Put on the grid of e4m3 here, ties to even, so that the cast is exact on every device: at
        # 1.5 * 2^20 times a number's power of two, float32 has 3 mantissa bits left for it. Below
        # 2^-6 the grid is even.
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        coarse = tl.maximum(power, 0.015625) * 1572864.0
        return ((scaled + coarse) - coarse).to(tl.float8e4nv)
    else:  # noqa: RET505  one return type a compilation
        return x


@triton.jit
def row_scale(peak):
    """(scale, inverse scale) of numbers whose largest magnitude is `peak`, float32."""
    peak = tl.maximum(peak, 5.421010862427522e-20)  # MIN_PEAK
    return tl.div_rn(peak, 448.0), tl.div_rn(448.0, peak)


@triton.jit
def round_and_store(
    x_N,  # columns [start, start + BLOCK) of a row; zeros past SIZE
    start,
    out_ptr,  # float8_e4m3fn [SIZE], of the row
    scales_ptr,  # float32 [1], or [SIZE / GROUP] with a GROUP, of the row
    scale_stride,  # from one of these to the next
    given_ptr,  # float32 [1]; unused without IS_GIVEN
    SIZE: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """As `quantise_rows`: by the given scale, by groups, or by that of a row which is all here."""
    GROUPS: tl.constexpr = BLOCK // GROUP if GROUP else 1
    x_GI = tl.reshape(x_N, (GROUPS, BLOCK // GROUPS))
    if IS_GIVEN:
        peak_G = tl.load(given_ptr + tl.zeros((GROUPS,), tl.int32)) * 448.0
    else:
        peak_G = tl.max(tl.abs(x_GI.to(tl.float32)), axis=1)
    scale_G, inverse_G = row_scale(peak_G)
    # runs of 8, as 16-bit numbers are read: longer ones would order sums before in another way
    RUN: tl.constexpr = 8 if BLOCK >= 8 else BLOCK
    run_R8 = tl.arange(0, BLOCK // RUN)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    column_R8 = start + run_R8
    values_R8 = tl.reshape(quantise(x_GI, inverse_G[:, None], tl.float8e4nv), (BLOCK // RUN, RUN))
    tl.store(out_ptr + column_R8, values_R8, mask=column_R8 < SIZE)
    g_G = start // (BLOCK // GROUPS) + tl.arange(0, GROUPS)
    valid_G = g_G < (SIZE // GROUP if GROUP else 1)
    tl.store(scales_ptr + g_G * scale_stride, scale_G, mask=valid_G)


@triton.jit
def quantise_rows_kernel(
    x_ptr,  # [T, E], rows `x_stride` apart
    q_ptr,  # float8_e4m3fn [T, E]
    scale_ptr,  # float32 [T]
    given_ptr,  # float32 [1]; unused without IS_GIVEN
    x_stride,
    E: tl.constexpr,
    IS_GIVEN: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    x_row = x_ptr + token * x_stride
    e_E = tl.arange(0, BLOCK_E)
    if IS_GIVEN:
        peak = tl.load(given_ptr) * 448.0
    else:
        peak_E = tl.zeros((BLOCK_E,), dtype=tl.float32)
        for start in range(0, E, BLOCK_E):
            x_E = tl.load(x_row + start + e_E, mask=e_E < E - start, other=0.0).to(tl.float32)
            peak_E = tl.maximum(peak_E, tl.abs(x_E))
        peak = tl.max(peak_E, axis=0)
    scale, inverse = row_scale(peak)
    tl.store(scale_ptr + token, scale)
    for start in range(0, E, BLOCK_E):
        x_E = tl.load(x_row + start + e_E, mask=e_E < E - start, other=0.0)
        q_E = quantise(x_E, inverse, q_ptr.dtype.element_ty)
        tl.store(q_ptr + token * E + start + e_E, q_E, mask=e_E < E - start)


@triton.jit(do_not_specialize_on_alignment=SCALE_STRIDES)
def quantise_groups_kernel(
    x_ptr,  # [T, E], rows `x_stride` apart
    q_ptr,  # float8_e4m3fn [T, E]
    scale_ptr,  # float32 [T, G]
    x_stride,
    scale_stride_t,
    scale_stride_g,
    E: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (BLOCK_G * GROUP)
    e_E = start + tl.arange(0, BLOCK_G * GROUP)
    x_E = tl.load(x_ptr + token * x_stride + e_E, mask=e_E < E, other=0.0)
    round_and_store(
        x_E, start, q_ptr + token * E, scale_ptr + token * scale_stride_t, scale_stride_g, None, E,
        False, BLOCK_G * GROUP, GROUP,
    )  # fmt: skip


def empty_rounded(
    num_tokens: int, width: int, device: torch.device, *, grouped: bool, in_columns: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantise_rows` returns, to be written; both with room behind it for `whole_columns`.
    Raises ValueError: a width that is no whole number of groups."""
    if grouped and width % GROUP:
        raise ValueError(f"rows of {width} numbers are not scaled by {GROUP}; give a multiple")
    num_scales = width // GROUP if grouped else 1
    num_rows = num_tokens
    if in_columns:
        num_rows = triton.cdiv(num_tokens, ROWS_OF_COLUMNS) * ROWS_OF_COLUMNS
    shape = (num_scales, num_rows) if in_columns else (num_rows, num_scales)
    q_TE = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=device)
    scale_TG = torch.empty(shape, dtype=torch.float32, device=device)
    return q_TE[:num_tokens], (scale_TG.t() if in_columns else scale_TG)[:num_tokens]


def whole_columns(q_TE: torch.Tensor, scale_TG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `quantise_rows` has given `in_columns`, with the rows behind it up to a multiple of
    `ROWS_OF_COLUMNS`, which hold anything."""
    num_rows = scale_TG.stride(1)
    return (
        q_TE.as_strided((num_rows, q_TE.shape[1]), q_TE.stride()),
        scale_TG.as_strided((num_rows, scale_TG.shape[1]), scale_TG.stride()),
    )


def quantise_rows(
    x_TE: torch.Tensor,
    *,
    grouped: bool = False,
    given: torch.Tensor | None = None,
    in_columns: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token rounded to float8: `x = q * scale`.

        scale = max |x| / 448, of a token or of 128 inputs of it;  q = x / scale, to the nearest

    Args:
        x_TE: float32, float16 or bfloat16; the last dimension contiguous.
        grouped: a scale for each 128 inputs; E is a multiple of that.
        given: float32 [1], the scale of all tokens; what is beyond 448 of it is cut.
        in_columns: a group's scales of all tokens stand side by side in memory; needs `grouped`.

    Returns:
        (float8_e4m3fn [T, E], float32 [T, G]), new tensors.
    """
    shape = (x_TE.shape[0], x_TE.shape[-1])
    check_tensor("x_TE", x_TE, shape, FLOATS, x_TE.device, contiguous_dims=1)
    num_tokens, width = shape
    q_TE, scale_TG = empty_rounded(
        num_tokens, width, x_TE.device, grouped=grouped, in_columns=in_columns
    )
    launch = {"num_warps": 4, **dependent_launch(x_TE.device)}
    if num_tokens and grouped:
        constants = group_constants(width)
        quantise_groups_kernel[(num_tokens, triton.cdiv(width // GROUP, constants["BLOCK_G"]))](
            x_TE, q_TE, scale_TG, x_TE.stride(0), *scale_TG.stride(), **constants, **launch
        )
    elif num_tokens:
        quantise_rows_kernel[(num_tokens,)](
            x_TE, q_TE, scale_TG, given, x_TE.stride(0), **row_constants(width, given), **launch
        )
    return q_TE, scale_TG


def rounding_constants(
    scales_TG: torch.Tensor | None, given: torch.Tensor | None
) -> dict[str, Any]:
    """Of a kernel that may round what it makes with `round_and_store`."""
    grouped = scales_TG is not None and scales_TG.shape[1] > 1
    return {
        "ROUNDS": scales_TG is not None,
        "IS_GIVEN": given is not None,
        "GROUP": GROUP if grouped else 0,
    }


def row_constants(width: int, given: torch.Tensor | None = None) -> dict[str, Any]:
    """Constants of the kernel that rounds whole rows."""
    block = min(triton.next_power_of_2(width), _MOST_AT_ONCE)
    return {"E": width, "IS_GIVEN": given is not None, "BLOCK_E": block}


def group_constants(width: int) -> dict[str, int]:
    """Constants of the kernel that rounds groups."""
    block = min(triton.next_power_of_2(width // GROUP), _GROUPS_AT_ONCE)
    return {"E": width, "GROUP": GROUP, "BLOCK_G": block}
