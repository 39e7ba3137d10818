"""Norms (RMSNorm, arXiv:1910.07467) and gated activations (arXiv:2002.05202) in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, see `Operations.rms_norm`."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    normed = F.rms_norm(x.float(), weight.shape, None, eps)
    return (normed.to(weight.dtype) * weight).to(x.dtype)


def silu_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, see `Operations.silu_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def gelu_tanh_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, see `Operations.gelu_tanh_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)
