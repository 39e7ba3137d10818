"""Products in float8: rounding of tokens, and the device's own product."""

from __future__ import annotations

import functools

import torch

from kernels.triton.fp8_linear import (
    float8_linear,
    prepare_float8,
    quantise_rows,
    reference_float8_linear,
)
from scripts.gpu.comparison import row_error
from scripts.gpu.frame import Check, Group, Timing, Work

ROUNDING = 8e-3
"""The result is rounded to bf16 once (2^-9); the library's sums are float32."""
FP8_ROUNDING = 0.07
"""2^-4 of an element at most; the row's largest is exact."""


def check_rows(num_rows: int, width: int, *, device: str = "cuda") -> float:
    x_TE = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
    x_TE[1::7] = 0
    q_TE, scale_T = quantise_rows(x_TE)
    return row_error(q_TE.float() * scale_T[:, None], x_TE.float())


def check(num_rows: int, inputs: int, outputs: int, *, device: str = "cuda") -> float:
    """Against the same rounded operands, multiplied in float32."""
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5)
    weight = prepare_float8(weight_NE.bfloat16())
    x_TE = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
    bias_N = torch.randn(outputs, dtype=torch.bfloat16, device=device)
    reference = reference_float8_linear(*quantise_rows(x_TE), weight, bias_N)
    return row_error(float8_linear(x_TE, weight, bias_N), reference)


def prepare(num_rows: int, inputs: int, outputs: int, *, device: str = "cuda") -> Work:
    """Rounding included. The floor is that of bf16 products, which float8 may pass."""
    weight_NE = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    weight = prepare_float8(weight_NE.mul_(inputs**-0.5))
    x_TE = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
    return Work(
        call=lambda: float8_linear(x_TE, weight),
        num_bytes=float(weight_NE.numel() + 2 * num_rows * (inputs + outputs)),
        num_flops=2.0 * num_rows * inputs * outputs,
    )


def group() -> Group:
    checks = [
        Check(
            f"fp8 rows {rows} x {width}", functools.partial(check_rows, rows, width), FP8_ROUNDING
        )
        for rows, width in ((1, 4096), (63, 14336), (300, 576))
    ]
    checks += [
        Check(f"fp8 linear {rows} rows", functools.partial(check, rows, 4096, 3072), ROUNDING)
        for rows in (1, 17, 300)
    ]
    timings = tuple(
        Timing(
            f"fp8 linear {rows} x 4096 -> 28672",
            f"fp8 linear {after} rows",
            functools.partial(prepare, rows, 4096, 28672),
        )
        for rows, after in ((1, 1), (64, 17), (256, 300), (8192, 300))
    )
    return Group("fp8_linear", tuple(checks), timings)
