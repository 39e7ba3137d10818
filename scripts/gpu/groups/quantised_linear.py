"""Products with weights of 8 and 4 bits: few rows, where the weight's bytes bound."""

from __future__ import annotations

import functools

import torch

from kernels.triton.quantised_linear import quantised_linear
from kernels.triton.quantised_weights import QuantisedWeight, dequantise, quantise
from kernels.triton.quantised_widening import dequantise_to
from scripts.gpu.comparison import row_error, worst
from scripts.gpu.frame import Check, Group, Timing, Work

ROUNDING = 6e-3
"""The result is rounded to bf16 once (2^-9), and sums run in float32."""


def make(
    num_outputs: int, num_inputs: int, num_bits: int, symmetric: bool, device: str
) -> QuantisedWeight:
    weight_NE = torch.randn(num_outputs, num_inputs, device=device).mul_(num_inputs**-0.5)
    return quantise(weight_NE, num_bits=num_bits, group_size=128, symmetric=symmetric)


def check(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    *,
    num_bits: int,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> float:
    """The product against one in float32 with the widened weight, and the widening by itself (a
    fused multiply-add may round the other way)."""
    weight = make(num_outputs, num_inputs, num_bits, symmetric, device)
    x_TE = torch.randn(num_rows, num_inputs, dtype=dtype, device=device)
    bias_N = torch.randn(num_outputs, dtype=dtype, device=device)
    wide_NE = dequantise(weight).to(dtype)
    reference = x_TE.float() @ wide_NE.float().T + bias_N.float()
    return worst(
        row_error(quantised_linear(x_TE, weight, bias_N), reference),
        row_error(dequantise_to(weight, dtype), wide_NE),
    )


def prepare(
    num_rows: int, num_outputs: int, num_inputs: int, *, num_bits: int, device: str = "cuda"
) -> Work:
    weight = make(num_outputs, num_inputs, num_bits, True, device)
    x_TE = torch.randn(num_rows, num_inputs, dtype=torch.bfloat16, device=device)
    tensors = (weight.packed_NJ, weight.scales_NG, x_TE)
    return Work(
        call=lambda: quantised_linear(x_TE, weight),
        num_bytes=sum(float(t.numel() * t.element_size()) for t in tensors)
        + 2.0 * num_rows * num_outputs,
        num_flops=2.0 * num_rows * num_outputs * num_inputs,
    )


def group() -> Group:
    checks = []
    for num_bits in (8, 4):
        for symmetric in (True, False):
            kind = f"int{num_bits} {'symmetric' if symmetric else 'offsets'}"
            for rows in (1, 16, 63, 300):
                run = functools.partial(
                    check, rows, 3072, 4096, num_bits=num_bits, symmetric=symmetric
                )
                checks.append(Check(f"quantised linear {kind} {rows} rows", run, ROUNDING))
    timings = tuple(
        Timing(
            f"int{num_bits} linear {rows} x {inputs} -> {outputs}",
            f"quantised linear int{num_bits} symmetric {after} rows",
            functools.partial(prepare, rows, outputs, inputs, num_bits=num_bits),
        )
        for num_bits in (8, 4)
        for rows, after, inputs, outputs in (
            (1, 1, 4096, 28672),
            (16, 16, 4096, 28672),
            (64, 63, 4096, 28672),
            (1, 1, 4096, 4096),
        )
    )
    return Group("quantised_linear", tuple(checks), timings)
