"""Gated activations: SiLU and GELU, plain and rounded to float8."""

import torch
import torch.nn.functional as F

from kernels.triton.activation import gated_rounded, gelu_tanh_and_mul, silu_and_mul
from kernels.triton.fp8_rounding import quantise_rows
from tests.gpu.checks.errors import poison, row_error, worst
from tests.gpu.checks.fp8_linear import num_different_rounded, roundings

BF16_ROUNDING = 8e-3
"""The activation and the product are each rounded to bf16 (2^-9)."""


def check(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Both activations against float32."""
    gate_up = torch.randn(num_rows, 2 * width, dtype=dtype, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = poison(torch.empty(num_rows, width, dtype=dtype, device=device))
    silu_error = row_error(silu_and_mul(gate_up, out_TF=out), F.silu(gate) * up)
    gelu = F.gelu(gate, approximate="tanh") * up
    return worst(silu_error, row_error(gelu_tanh_and_mul(gate_up, out_TF=poison(out)), gelu))


def check_rounded(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Numbers that differ from the activations', rounded in a kernel of its own: by row, by groups
    and by a given scale."""
    gate_up = torch.randn(num_rows, 2 * width, dtype=dtype, device=device)
    return worst(
        *(
            num_different_rounded(
                gated_rounded(gate_up, is_gelu=is_gelu, **how), quantise_rows(gated, **how)
            )
            for how in roundings(device)
            for is_gelu, gated in (
                (False, silu_and_mul(gate_up)),
                (True, gelu_tanh_and_mul(gate_up)),
            )
        )
    )
