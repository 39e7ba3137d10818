"""Rounding to float8_e4m3fn and int8, ties to even, shared by kernels that write such values.

scale = max(|row|, MIN_PEAK) / most, with most 448 (fp8) or 127 (int8);
value = round(clamp(x / scale, -most, most))."""

import torch
import triton
import triton.language as tl

FP8_MAX = 448.0
INT8_MAX = 127.0
MIN_PEAK = 2.0**-64

QUANTISED_MAX = {torch.float8_e4m3fn: FP8_MAX, torch.int8: INT8_MAX}
"""Largest value of each dtype that a kernel can quantise to; int8 leaves out -128."""


def quantise_rows_reference(
    x_TN: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values [T, N] of `dtype`, float32 scales [T]) of rows, in torch."""
    most = torch.tensor(QUANTISED_MAX[dtype])
    wide_TN = x_TN.float()
    peak_T = wide_TN.abs().amax(dim=1).clamp(min=MIN_PEAK)
    scaled_TN = (wide_TN * (most / peak_T)[:, None]).clamp(-most, most)
    if dtype == torch.int8:
        scaled_TN = scaled_TN.round()
    return scaled_TN.to(dtype), peak_T / most


def quantise_reference(x: torch.Tensor, inverse_scale: float) -> torch.Tensor:
    """`x * inverse_scale` as float8_e4m3fn, clamped, in torch."""
    scaled = x.float() * torch.tensor(inverse_scale, dtype=torch.float32)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


@triton.jit
def quantise(x, inverse_scale, dtype: tl.constexpr):
    """`x * inverse_scale` as tl.float8e4nv or tl.int8; `x` as it is for any other dtype."""
    if dtype == tl.float8e4nv:
        scaled = x.to(tl.float32) * inverse_scale
        scaled = tl.minimum(tl.maximum(scaled, -448.0), 448.0)
        # Put on the grid of e4m3 here, ties to even, so that the cast is exact on every device: at
        # 1.5 * 2^20 times a number's power of two, float32 has 3 mantissa bits left for it. Below
        # 2^-6 the grid is even.
        power = (scaled.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        coarse = tl.maximum(power, 0.015625) * 1572864.0
        return ((scaled + coarse) - coarse).to(tl.float8e4nv)
    elif dtype == tl.int8:  # noqa: RET505  one return type a compilation
        scaled = x.to(tl.float32) * inverse_scale
        scaled = tl.minimum(tl.maximum(scaled, -127.0), 127.0)
        # beside 1.5 * 2^23 a float32 has no fraction: the addition rounds, ties to even
        return ((scaled + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        return x


@triton.jit
def row_scale(peak, dtype: tl.constexpr):
    """(scale, inverse scale) of a row whose largest magnitude is `peak`, float32."""
    most = 448.0 if dtype == tl.float8e4nv else 127.0
    peak = tl.maximum(peak, 5.421010862427522e-20)  # MIN_PEAK
    return tl.div_rn(peak, most), tl.div_rn(most, peak)
