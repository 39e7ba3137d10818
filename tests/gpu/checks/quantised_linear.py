"""Products with weights of 8 and 4 bits: few rows, where the weight's bytes bound."""

import torch

from kernels.triton.linear.gguf_blocks import from_gguf
from kernels.triton.linear.quantised import dequantise_to, quantised_linear
from kernels.triton.linear.quantised_weights import (
    QuantisedWeight,
    dequantise,
    narrowed,
    quantise,
)
from tests.gpu.checks.errors import INVARIANT_ROWS, num_different_in_batches, row_error, worst
from tests.kernels.gguf_parts import random_part

ROUNDING = 6e-3
"""The result is rounded to bf16 once (2^-9), and sums run in float32."""


def make(
    num_outputs: int, num_inputs: int, num_bits: int, symmetric: bool, device: str
) -> QuantisedWeight:
    weight_NE = torch.randn(num_outputs, num_inputs, device=device).mul_(num_inputs**-0.5)
    return quantise(weight_NE, num_bits=num_bits, group_size=128, symmetric=symmetric)


def check_blocks(
    type_name: str, num_rows: int, num_outputs: int, num_inputs: int, *, device: str
) -> tuple[float, float]:
    """Blocks of a GGUF type, widened and multiplied in float32, against the gguf package's numbers:
    the largest differences, as shares of the largest number."""
    part = random_part(type_name, num_outputs, num_inputs)
    blocks = part.arrays["blocks"].to(device)
    weight = narrowed(from_gguf(blocks, num_outputs, num_inputs, type_name))
    w_NE = part.dequantise().to(device)
    x_TE = torch.randn(num_rows, num_inputs, device=device)
    expected = (x_TE.double() @ w_NE.T.double()).float()
    widened = (dequantise_to(weight, torch.float32) - w_NE).abs().max() / w_NE.abs().max()
    multiplied = (quantised_linear(x_TE, weight) - expected).abs().max() / expected.abs().max()
    return float(widened), float(multiplied)


def check(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    *,
    num_bits: int,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    device: str,
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


def check_same_bits(
    inputs: int,
    outputs: int,
    *,
    num_bits: int,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, ...] = INVARIANT_ROWS,
    device: str,
) -> float:
    """See `num_different_in_batches`; with `--batch-invariant`."""
    weight = make(outputs, inputs, num_bits, False, device)
    x_TE = torch.randn(max(rows), inputs, dtype=dtype, device=device)
    return num_different_in_batches(
        lambda some: quantised_linear(x_TE[some], weight, batch_invariant=True), rows
    )
