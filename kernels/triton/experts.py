"""Mixture of experts as the engine asks for it: weights taken over once, then one call a layer.

Owns the rows of a tile. Kernels are `moe_routing`'s and `moe_linear`'s; layers and models must stay
unknown.

The rows of a tile decide in which order the products along E and F are summed, so they decide bits:

    tile_rows   16 | 64 | 128   by the step's tokens (`choose_tile_rows`): fastest
                one for all     `invariant_tile_rows`: a token's bits depend on that token alone

The first is the only thing about a step that chooses between compiled forms, and no form serves
less than a doubling of tokens: a warm-up whose steps double up to the largest has met them all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface.operations import ExpertRouting
from kernels.triton.moe_linear import fused_moe

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class TritonExpertWeights:
    """gate_up_XFE: [X, 2F, E], F outputs of gate, then of up; down_XEF: [X, E, F]; contiguous."""

    gate_up_XFE: torch.Tensor
    down_XEF: torch.Tensor

    @property
    def num_experts(self) -> int:
        return self.down_XEF.shape[0]


def prepare_experts(gate_up_XFE: torch.Tensor, down_XEF: torch.Tensor) -> TritonExpertWeights:
    """See `Operations.prepare_experts`. Contiguous tensors are kept, not copied.

    Raises:
        ValueError: shapes that do not fit each other.
        TypeError: dtypes that differ or that no kernel takes.
    """
    num_experts, width, features = down_XEF.shape
    if tuple(gate_up_XFE.shape) != (num_experts, 2 * features, width):
        raise ValueError(
            f"gate_up weights are {tuple(gate_up_XFE.shape)} and down weights "
            f"{tuple(down_XEF.shape)}; give [X, 2F, E] and [X, E, F]"
        )
    if gate_up_XFE.dtype != down_XEF.dtype or down_XEF.dtype not in _DTYPES:
        raise TypeError(
            f"gate_up weights are {gate_up_XFE.dtype} and down weights {down_XEF.dtype}; "
            f"give both in one of {_DTYPES}"
        )
    return TritonExpertWeights(gate_up_XFE.contiguous(), down_XEF.contiguous())


def mixture_of_experts(
    x_TE: torch.Tensor,
    router_logits_TX: torch.Tensor,
    experts: TritonExpertWeights,
    routing: ExpertRouting,
    *,
    batch_invariant: bool,
) -> torch.Tensor:
    """See `Operations.mixture_of_experts`.

    Args:
        batch_invariant: the same bits for a token whatever the number of tokens.
    """
    return fused_moe(
        x_TE,
        router_logits_TX,
        experts.gate_up_XFE,
        experts.down_XEF,
        routing.top_k,
        routing.renormalise,
        weights_dtype=routing.weights_dtype,
        tile_rows=invariant_tile_rows(x_TE.dtype) if batch_invariant else None,
    )


def invariant_tile_rows(dtype: torch.dtype) -> int:
    """The rows of every tile, whatever the step: 64 is where wgmma begins, so prefills keep it; a
    decode is bound by the bytes of weights, which are the same. float32 knows 16 only."""
    return 16 if dtype == torch.float32 else 64
