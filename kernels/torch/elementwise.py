"""Norms (RMSNorm, arXiv:1910.07467) and activations, gated too (arXiv:2002.05202), in torch."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kernels.interface.operations import LEAST_LENGTH, Activation
from kernels.interface.weights import SWIGLU_ALPHA, SWIGLU_LIMIT


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.rms_norm`."""
    if x_TE.dtype == torch.float32:
        return F.rms_norm(x_TE, weight_E.shape, weight_E, eps)
    normed = F.rms_norm(x_TE.float(), weight_E.shape, None, eps)
    return (normed.to(weight_E.dtype) * weight_E).to(x_TE.dtype)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Operations.add_rms_norm`."""
    residual_TE.add_(x_TE)
    return rms_norm(residual_TE, weight_E, eps), residual_TE


def layer_norm(x_TE: torch.Tensor, weight_2E: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.layer_norm`."""
    return F.layer_norm(x_TE, weight_2E.shape[1:], weight_2E[0], weight_2E[1], eps)


def add_layer_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_2E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Operations.add_layer_norm`."""
    residual_TE.add_(x_TE)
    return layer_norm(residual_TE, weight_2E, eps), residual_TE


def mean_direction(x_TE: torch.Tensor, size: int) -> npt.NDArray[np.float32]:
    """See `Operations.mean_direction`."""
    mean_E = x_TE[:, :size].float().mean(0)
    mean_E /= mean_E.norm().clamp_min(LEAST_LENGTH)
    direction: npt.NDArray[np.float32] = mean_E.cpu().numpy()
    return direction


def activate(x_TF: torch.Tensor, activation: Activation) -> torch.Tensor:
    """See `Operations.activate`."""
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x_TF, approximate="none" if activation == "gelu" else "tanh")
    if activation == "silu":
        return F.silu(x_TF)
    return x_TF.relu_() if activation == "relu" else x_TF.relu_().square_()


def gelu_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """See `Operations.gelu_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.gelu(gate_TF).mul_(up_TF)


def silu_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)


def gelu_tanh_and_mul(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """See `Operations.gelu_tanh_and_mul`."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    return F.gelu(gate_TF, approximate="tanh").mul_(up_TF)


def swiglu_oai(gate_up_TF2: torch.Tensor) -> torch.Tensor:
    """gpt-oss's activation of experts, see `ExpertActivation`: [T, 2F] -> [T, F]. Consumes its
    argument."""
    gate_TF, up_TF = gate_up_TF2.chunk(2, dim=-1)
    gate_TF.clamp_(max=SWIGLU_LIMIT)
    up_TF.clamp_(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate_TF * torch.sigmoid(gate_TF * SWIGLU_ALPHA)).mul_(up_TF + 1)
