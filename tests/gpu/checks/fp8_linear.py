"""Products in float8: rounding of tokens, and the device's own product."""

from typing import Any

import torch

from kernels.triton.fp8_rounding import quantise_rows, reference_quantise_rows
from kernels.triton.linear.fp8 import float8_linear, prepare_float8, reference_float8_linear
from tests.gpu.checks.errors import (
    INVARIANT_ROWS,
    num_different,
    num_different_in_batches,
    row_error,
)
from tests.gpu.device import DEVICE

ROUNDING = 8e-3
"""The result is rounded to bf16 once (2^-9); the library's sums are float32."""
SUM_ERROR = 1e-5 if DEVICE == "cpu" else 2**-11
"""Of the largest result of our own kernels. Tensor cores keep 14 bits of a sum of 32 products, from
the largest down (DeepSeek-AI, 2024, section 3.3.2), and a fresh sum of ours has four of those."""
FP8_ROUNDING = 0.07
"""2^-4 of an element at most; the row's largest is exact."""


def roundings(device: str) -> list[dict[str, Any]]:
    """Options of `quantise_rows`."""
    return [{}, {"grouped": True}, {"given": torch.full((1,), 0.01, device=device)}]


def num_different_rounded(
    ours: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> float:
    """Codes and scales of other bits."""
    (codes, scales), (expected_codes, expected_scales) = ours, expected
    of_codes = num_different(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    return of_codes + num_different(scales, expected_scales)


def check_rows(num_rows: int, width: int, *, device: str) -> float:
    x_TE = torch.randn(num_rows, width, dtype=torch.bfloat16, device=device)
    x_TE[1::7] = 0
    q_TE, scale_T1 = quantise_rows(x_TE)
    return row_error(q_TE.float() * scale_T1, x_TE.float())


def check(num_rows: int, inputs: int, outputs: int, *, device: str, grouped: bool = False) -> float:
    """Against the same rounded operands, multiplied in float32."""
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5)
    weight = prepare_float8(*reference_quantise_rows(weight_NE, grouped=grouped))
    x_TE = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
    bias_N = torch.randn(outputs, dtype=torch.bfloat16, device=device)
    rows = quantise_rows(x_TE, grouped=grouped)
    reference = reference_float8_linear(*rows, weight, bias_N)
    return row_error(float8_linear(x_TE, weight, bias_N), reference)


def check_blocks(
    num_rows: int, inputs: int, outputs: int, *, device: str, by_library: bool = False
) -> float:
    """As `check`, of scales of 128 x 128 weights, by the library's product or our kernel's."""
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5)
    codes_NE, scales_NG = reference_quantise_rows(weight_NE, grouped=True)
    of_blocks = scales_NG[::128] * torch.rand_like(scales_NG[::128]).add_(0.5)
    scales_NG = of_blocks.repeat_interleave(128, dim=0)[:outputs]
    weight = prepare_float8(codes_NE, scales_NG, blocks_by_library=by_library)
    x_TE = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
    reference = reference_float8_linear(*quantise_rows(x_TE, grouped=True), weight)
    return row_error(float8_linear(x_TE, weight), reference)


def check_same_bits(
    inputs: int,
    outputs: int,
    *,
    grouped: bool,
    rows: tuple[int, ...] = INVARIANT_ROWS,
    device: str,
) -> float:
    """See `num_different_in_batches`; with `--batch-invariant`."""
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5)
    weight = prepare_float8(*reference_quantise_rows(weight_NE, grouped=grouped))
    x_TE = torch.randn(max(rows), inputs, dtype=torch.bfloat16, device=device)
    return num_different_in_batches(
        lambda some: float8_linear(x_TE[some], weight, batch_invariant=True), rows
    )
