"""Gated activations: SiLU and GELU, plain and with quantised results."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kernels.triton.activation import (
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_quantised,
)
from scripts.gpu.comparison import poison, row_error, worst
from scripts.gpu.frame import Check, Group, Timing, Work

BF16_ROUNDING = 8e-3
"""The activation and the product are each rounded to bf16 (2^-9)."""
FP8_ROUNDING = 0.07
INT8_ROUNDING = 1.5e-2


def check(num_rows: int, width: int, dtype: torch.dtype, *, device: str = "cuda") -> float:
    """Both activations against float32."""
    gate_up = torch.randn(num_rows, 2 * width, dtype=dtype, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = poison(torch.empty(num_rows, width, dtype=dtype, device=device))
    silu_error = row_error(silu_and_mul(gate_up, out_TF=out), F.silu(gate) * up)
    gelu = F.gelu(gate, approximate="tanh") * up
    return worst(silu_error, row_error(gelu_tanh_and_mul(gate_up, out_TF=poison(out)), gelu))


def check_quantised(
    num_rows: int, width: int, dtype: torch.dtype, *, device: str = "cuda"
) -> float:
    """Values times scales against float32."""
    gate_up = torch.randn(num_rows, 2 * width, dtype=torch.bfloat16, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    values, scales_T = silu_and_mul_quantised(gate_up, dtype)
    return row_error(values.float() * scales_T[:, None], F.silu(gate) * up)


def prepare(num_rows: int, width: int, *, device: str = "cuda") -> Work:
    gate_up = torch.randn(num_rows, 2 * width, dtype=torch.bfloat16, device=device)
    out = torch.empty(num_rows, width, dtype=torch.bfloat16, device=device)
    return Work(call=lambda: silu_and_mul(gate_up, out_TF=out), num_bytes=6.0 * num_rows * width)


def group() -> Group:
    checks = []
    for dtype, tolerance in ((torch.bfloat16, BF16_ROUNDING), (torch.float32, 1e-5)):
        for rows, width in ((1, 14336), (63, 1536), (300, 14336), (257, 3072), (5, 65)):
            name = f"activation {str(dtype).removeprefix('torch.')} {rows} x {width}"
            checks.append(Check(name, functools.partial(check, rows, width, dtype), tolerance))
    for dtype, tolerance in ((torch.float8_e4m3fn, FP8_ROUNDING), (torch.int8, INT8_ROUNDING)):
        run = functools.partial(check_quantised, 300, 14336, dtype)
        checks.append(Check(f"activation to {str(dtype).removeprefix('torch.')}", run, tolerance))
    timings = tuple(
        Timing(
            f"silu x up {rows} x {width}",
            "activation bfloat16 300 x 14336",
            functools.partial(prepare, rows, width),
        )
        for rows, width in ((1, 14336), (64, 14336), (256, 14336), (8192, 14336), (256, 3072))
    )
    return Group("activation", tuple(checks), timings)
