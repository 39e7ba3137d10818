"""What torch does on this device: dense products, which the engine leaves to cuBLAS, and its own
fused attention, which ours is measured against."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from scripts.gpu.comparison import row_error
from scripts.gpu.frame import Check, Group, Timing, Work

ROUNDING = 1e-2


def check_linear(num_rows: int, inputs: int, outputs: int, *, device: str = "cuda") -> float:
    x_TE, weight_NE = _linear_inputs(num_rows, inputs, outputs, device)
    return row_error(F.linear(x_TE, weight_NE), x_TE.float() @ weight_NE.float().T)


def prepare_linear(num_rows: int, inputs: int, outputs: int, *, device: str = "cuda") -> Work:
    x_TE, weight_NE = _linear_inputs(num_rows, inputs, outputs, device)
    return Work(
        call=lambda: F.linear(x_TE, weight_NE),
        num_bytes=2.0 * (weight_NE.numel() + num_rows * (inputs + outputs)),
        num_flops=2.0 * num_rows * inputs * outputs,
    )


def check_attention(length: int, *, device: str = "cuda") -> float:
    q, k, v = _attention_inputs(length, device)
    return row_error(_attend(q, k, v), _attend(q.float(), k.float(), v.float()))


def prepare_attention(length: int, *, device: str = "cuda") -> Work:
    """Of Llama-3.1-8B: 32 query heads, 8 key/value heads of 128."""
    q, k, v = _attention_inputs(length, device)
    return Work(
        call=lambda: _attend(q, k, v),
        num_bytes=2.0 * (2 * q.numel() + k.numel() + v.numel()),
        num_flops=4.0 * 32 * 128 * length * (length + 1) / 2,
    )


def _linear_inputs(
    num_rows: int, inputs: int, outputs: int, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    x_TE = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
    weight_NE = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
    return x_TE, weight_NE.mul_(inputs**-0.5)


def _attention_inputs(length: int, device: str) -> list[torch.Tensor]:
    return [
        torch.randn(1, heads, length, 128, dtype=torch.bfloat16, device=device)
        for heads in (32, 8, 8)
    ]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def group() -> Group:
    linear = "torch linear 63 x 4096 -> 6144"
    checks = (
        Check(linear, functools.partial(check_linear, 63, 4096, 6144), ROUNDING),
        Check("torch attention 1000", functools.partial(check_attention, 1000), ROUNDING),
    )
    timings = [
        Timing(
            f"torch linear bf16 {rows} x {inputs} -> {outputs}",
            linear,
            functools.partial(prepare_linear, rows, inputs, outputs),
        )
        for inputs, outputs in ((4096, 6144), (4096, 28672), (14336, 4096), (4096, 128256))
        for rows in (1, 64, 256)
    ]
    attention = functools.partial(prepare_attention, 8192)
    timings.append(Timing("torch attention Llama-8B 8192", "torch attention 1000", attention))
    return Group("dense", checks, tuple(timings))
