"""Norms (RMSNorm, arXiv:1910.07467) and gated activations (arXiv:2002.05202) in torch."""

import torch
import torch.nn.functional as F


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.rms_norm`."""
    if x_TE.dtype == torch.float32:
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    normed = F.rms_norm(x_TE.float(), weight_E.shape, None, eps)
    return (normed.to(weight_E.dtype) * weight_E).to(x_TE.dtype)


def silu_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def gelu_tanh_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """See `Operations.gelu_tanh_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)
