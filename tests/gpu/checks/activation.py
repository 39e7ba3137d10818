"""Gated activations: SiLU and GELU, plain and with quantised results."""

import torch
import torch.nn.functional as F

from kernels.triton.activation import (
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_quantised,
)
from tests.gpu.checks.errors import poison, row_error, worst

BF16_ROUNDING = 8e-3
"""The activation and the product are each rounded to bf16 (2^-9)."""
FP8_ROUNDING = 0.07
INT8_ROUNDING = 1.5e-2


def check(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Both activations against float32."""
    gate_up = torch.randn(num_rows, 2 * width, dtype=dtype, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = poison(torch.empty(num_rows, width, dtype=dtype, device=device))
    silu_error = row_error(silu_and_mul(gate_up, out_TF=out), F.silu(gate) * up)
    gelu = F.gelu(gate, approximate="tanh") * up
    return worst(silu_error, row_error(gelu_tanh_and_mul(gate_up, out_TF=poison(out)), gelu))


def check_quantised(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Values times scales against float32."""
    gate_up = torch.randn(num_rows, 2 * width, dtype=torch.bfloat16, device=device)
    gate, up = gate_up.float().chunk(2, dim=-1)
    values, scales_T = silu_and_mul_quantised(gate_up, dtype)
    return row_error(values.float() * scales_T[:, None], F.silu(gate) * up)
