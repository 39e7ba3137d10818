"""What torch does on this device: dense products, which the engine leaves to cuBLAS, and its own
fused attention, which ours is measured against."""

import torch
import torch.nn.functional as F

from tests.gpu.checks.errors import row_error

ROUNDING = 1e-2


def check_linear(num_rows: int, inputs: int, outputs: int, *, device: str) -> float:
    x_TE, weight_NE = _linear_inputs(num_rows, inputs, outputs, device)
    return row_error(F.linear(x_TE, weight_NE), x_TE.float() @ weight_NE.float().T)


def check_attention(length: int, *, device: str) -> float:
    q, k, v = attention_inputs(length, device)
    return row_error(attend(q, k, v), attend(q.float(), k.float(), v.float()))


def _linear_inputs(
    num_rows: int, inputs: int, outputs: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    x_TE = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
    weight_NE = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    return x_TE, weight_NE.mul_(inputs**-0.5)


def attention_inputs(length: int, device: str) -> list[torch.Tensor]:
    return [
        torch.randn(1, heads, length, 128, dtype=torch.bfloat16, device=device)
        for heads in (32, 8, 8)
    ]


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
