"""One call of ours in place of the loop over experts of transformers' modules: tokens are gathered
by expert, and their products are those that our own families run."""

from __future__ import annotations

from typing import Any

import torch

from kernels.interface.operations import Operations
from kernels.interface.weights import ExpertRouting, ExpertWeights

_TRIED_ROWS = 7
_LEAST_ERROR = 1e-4
"""Of a module's largest output: what the order of sums explains in float32."""


class _OneCall:
    """Our operation as the `forward` of a module of transformers that has experts."""

    def __init__(self, experts: ExpertWeights, ops: Operations) -> None:
        self._experts = experts
        self._ops = ops

    def __call__(
        self, x_TE: torch.Tensor, ids_TA: torch.Tensor, weights_TA: torch.Tensor
    ) -> torch.Tensor:
        """[T, E], int64 [T, A] and weights of these experts -> [T, E]. A row's bits do not depend
        on the other rows."""
        # the operation chooses by itself: these logits leave it the experts and their weights
        weights_TA = weights_TA.float()
        logits_TX = x_TE.new_full((len(x_TE), self._experts.num_experts), -torch.inf)
        logits_TX.scatter_(1, ids_TA, weights_TA.log())
        routing = ExpertRouting(top_k=ids_TA.shape[1], renormalise=True)
        out_TE = self._ops.mixture_of_experts(x_TE.contiguous(), logits_TX, self._experts, routing)
        return out_TE.mul_(weights_TA.sum(1, keepdim=True))


def take_experts(model: Any, ops: Operations) -> int:
    """Give our operation the experts of every module that it computes, and drop their weights
    there. Returns the number of such modules.

    Args:
        model: in float32, on a CPU. A module that gives something else for some rows stays as it
            is; so do experts with biases, norms or weights the other way round.
    """
    taken = 0
    for module in list(model.modules()):
        if not _is_plain(module):
            continue
        gate_up_XFE, down_XEF = module.gate_up_proj.data, module.down_proj.data
        ours = _OneCall(ops.prepare_experts(gate_up_XFE, down_XEF), ops)
        if not _is_same(module, ours):
            continue
        module.forward = ours
        del module.gate_up_proj, module.down_proj
        taken += 1
    return taken


def _is_plain(module: Any) -> bool:
    """Whether a module is experts of a gate, up and down alone, as transformers marks them."""
    if getattr(module, "has_gate", False) is not True or not hasattr(module, "gate_up_proj"):
        return False
    others = (module.has_bias, module.has_post_expert_norm, module.is_transposed)
    return not any(others) and module.is_concatenated and module.gate_up_proj.ndim == 3


def _is_same(module: Any, ours: _OneCall) -> bool:
    """Whether both give the same for a few rows, each through two experts."""
    num_experts, width = module.down_proj.shape[:2]
    if num_experts < 2:
        return False
    generator = torch.Generator().manual_seed(0)
    x_TE = torch.randn(_TRIED_ROWS, width, generator=generator)
    ids_TA = torch.stack(
        [torch.randperm(num_experts, generator=generator)[:2] for _ in range(_TRIED_ROWS)]
    )
    weights_TA = torch.rand(_TRIED_ROWS, 2, generator=generator)
    theirs_TE = module(x_TE, ids_TA, weights_TA)
    error = (ours(x_TE, ids_TA, weights_TA) - theirs_TE).abs().max()
    return bool(error <= _LEAST_ERROR * theirs_TE.abs().max())
