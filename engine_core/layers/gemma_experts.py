"""Gemma 4's experts: beside a dense feed-forward, each with norms of its own.

norm(dense(norm(h))) + norm(experts(norm(h)))    h: the residual stream
"""

from dataclasses import replace

import torch

from engine_core.layers.config import ExpertConfig
from engine_core.layers.feed_forward import DenseFeedForward, SparseFeedForward
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import NoNorm, RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from kernels.interface.operations import Activations, ForwardContext, Operations, RoundedRows


class ExpertsBesideDense(SparseFeedForward):
    """See the module. The router reads `h / rms(h) * scale / sqrt(E)`, and a token's weight of an
    expert, renormalised, is multiplied with a number of the expert.

    Args:
        layer, experts, hidden_size: see `SparseFeedForward`.
        norms: before and behind the dense part, before and behind the experts.
        eps: of the router's norm.
    """

    def __init__(
        self,
        layer: str,
        experts: ExpertConfig,
        hidden_size: int,
        *,
        dense: DenseFeedForward,
        norms: list[RMSNorm],
        eps: float,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        super().__init__(layer, experts, hidden_size, dtype=dtype, ops=ops)
        self._dense, self._norms, self._eps = dense, norms, eps
        self._no_norm = NoNorm(hidden_size, dtype=dtype, ops=ops)
        self._factor = torch.tensor(hidden_size**-0.5)
        self._scale = Parameter(
            f"{layer}.router.scale", (hidden_size,), torch.float32, device=ops.device
        )
        self._scales = Parameter(
            f"{layer}.router.per_expert_scale",
            (experts.num_experts,),
            torch.float32,
            device=ops.device,
        )
        self._routing = replace(self._routing, scale_X=self._scales.tensor)

    @property
    def linears(self) -> list[FusedLinear]:
        return [*super().linears, *self._dense.linears]

    def placements(self) -> Placements:
        own = [each.placements() for each in (self._scale, self._scales)]
        norms = [norm.placements() for norm in self._norms]
        return merge([super().placements(), self._dense.placements(), *own, *norms])

    def __call__(self, x_TE: Activations, context: ForwardContext) -> torch.Tensor:
        """The residual stream, [T, E] -> [T, E]."""
        assert not isinstance(x_TE, RoundedRows), "two norms read it as it is"
        assert self._experts is not None, f"experts of {self._name} were not loaded"
        before_dense, behind_dense, before, behind = self._norms
        dense_TE = behind_dense(self._dense(before_dense(x_TE), context))
        routed_TE = self._ops.rms_norm(x_TE, self._scale.tensor, self._eps).mul_(self._factor)
        out_TE = self._ops.mixture_of_experts(
            before(x_TE),
            self._router(routed_TE),
            self._experts,
            self._routing,
            context.metadata[-1].slot_mapping_T,
        )
        return self._no_norm.add_before(None, behind(out_TE), dense_TE)[1]
