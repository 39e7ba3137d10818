"""Feed-forward layers: one gated block for every token, or a few of many such experts.

dense    down(activation(gate(x)) * up(x)), or down(activation(up(x)))
sparse   sum over the top_k experts x of weight[x] * down[x](silu(gate[x](h)) * up[x](h)), or with
         another `ExpertActivation`
shared   sparse + sigmoid(gate(h)) * dense, or sparse + dense
"""

from collections.abc import Sequence
from functools import partial

import torch

from engine_core.layers.config import Activation, ExpertConfig
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import (
    CopyWeight,
    PackedPlacement,
    Parameter,
    Placement,
    Placements,
    merge,
)
from kernels.interface.operations import (
    Activations,
    AllReduce,
    ForwardContext,
    Operations,
    RoundedRows,
)
from kernels.interface.weights import (
    ExpertActivation,
    ExpertBiases,
    ExpertRouting,
    ExpertWeights,
    WeightPart,
)


class DenseFeedForward:
    """Gate and up are one product.

    Args:
        name: checkpoint prefix, such as "model.layers.0.mlp".
        halves: the name of the one tensor that holds gate and up, if there is one.
        gated: whether there is a gate; relu2 has none.
        all_reduce: see `FusedLinear`, of down.
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool,
        halves: Sequence[str] = (),
        gated: bool = True,
        dtype: torch.dtype,
        ops: Operations,
        all_reduce: AllReduce | None = None,
    ) -> None:
        linear = partial(FusedLinear, bias=bias, dtype=dtype, ops=ops)
        self._is_gated = gated and activation != "relu2"
        halves = halves or (("gate_proj", "up_proj") if self._is_gated else ("up_proj",))
        size = (1 + self._is_gated) * intermediate_size // len(halves)
        self.first = linear([(f"{name}.{half}", size) for half in halves], hidden_size)
        self._down = linear(
            [(f"{name}.down_proj", hidden_size)], intermediate_size, all_reduce=all_reduce
        )
        self._activation: Activation = activation
        self._ops = ops

    @property
    def linears(self) -> list[FusedLinear]:
        return [self.first, self._down]

    def placements(self) -> Placements:
        return merge([self.first.placements(), self._down.placements()])

    def __call__(self, x_TE: Activations, _context: ForwardContext) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        gate_up_TF2 = self.first(x_TE)
        if not self._is_gated:
            return self._down(self._ops.activate(gate_up_TF2, self._activation))
        if (rounding := self._down.rounding) is not None:
            return self._down(rounding.gated(gate_up_TF2, self._activation))
        if self._activation == "silu":
            return self._down(self._ops.silu_and_mul(gate_up_TF2))
        return self._down(self._ops.gelu_tanh_and_mul(gate_up_TF2))


class SparseFeedForward:
    """Router and experts; gate and up are one product, and all experts one call.

    Args:
        layer: checkpoint prefix, such as "model.layers.0".
        all_reduce: see `FusedLinear`, of the experts' sum.
    """

    first = None  # router and experts read the inputs

    def __init__(
        self,
        layer: str,
        experts: ExpertConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        ops: Operations,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self._all_reduce = all_reduce
        self._name = f"{layer}.{experts.block}"
        self._projections = experts.projections
        num_experts, features = experts.num_experts, experts.intermediate_size
        self._here = range(num_experts) if experts.here is None else experts.here
        halves, width = len(self._projections) - 1, experts.latent_size or hidden_size
        self._gate_up_shape = (len(self._here), halves * features, width)
        self._down_shape = (len(self._here), width, features)
        self._activation: ExpertActivation = experts.gated if halves == 2 else "relu2"
        self._biases: ExpertBiases | None = None
        if experts.has_biases:
            shapes = self._gate_up_shape[:2], self._down_shape[:2]
            self._biases = (
                torch.empty(shapes[0], dtype=dtype, device=ops.device),
                torch.empty(shapes[1], dtype=dtype, device=ops.device),
            )
        router, self._bias = experts.router, None
        if router.has_bias:
            name, shape = f"{self._name}.gate.e_score_correction_bias", (num_experts,)
            self._bias = Parameter(name, shape, torch.float32, device=ops.device)
        self._routing = ExpertRouting(
            top_k=experts.top_k,
            renormalise=experts.renormalise,
            scores=router.scores,
            bias_X=None if self._bias is None else self._bias.tensor,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            epsilon=router.epsilon,
            scale=router.scale,
            weights_dtype=dtype if experts.round_weights else torch.float32,
            first_expert=self._here.start,
        )
        self._dtype = dtype
        self._ops = ops
        self._packing = ops.weight_packing(dtype, experts=self._name)
        is_wide = dtype is torch.float32 or ops.weight_packing(dtype) is not None
        self._widens = router.in_float32 and not is_wide
        self._router = FusedLinear(
            [(f"{self._name}.gate", num_experts)],
            hidden_size,
            bias=experts.has_biases,
            dtype=torch.float32 if self._widens else dtype,
            ops=ops,
            least_bits=32,  # a router that errs sends tokens through other experts
        )
        self._latent: tuple[FusedLinear, ...] = ()
        if experts.latent_size is not None:
            linear = partial(FusedLinear, bias=experts.latent_bias, dtype=dtype, ops=ops)
            self._latent = (
                linear([(f"{self._name}.fc1_latent_proj", width)], hidden_size),
                linear([(f"{self._name}.fc2_latent_proj", hidden_size)], width),
            )
        self._kept: dict[tuple[int, int, int], WeightPart] = {}  # until all are there
        self._num_missing = len(self._projections) * len(self._here) * (1 + experts.has_biases)
        self._fused: tuple[torch.Tensor, torch.Tensor] | None = None
        self._experts: ExpertWeights | None = None

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to: the experts are none of them, nor is a router of
        another dtype."""
        return [*self._latent] if self._widens else [self._router, *self._latent]

    def placements(self) -> Placements:
        _, width, features = self._down_shape
        *first, down = self._projections
        placements = merge(each.placements() for each in (self._router, *self._latent))
        if self._bias is not None:
            placements |= self._bias.placements()
        parts = [
            (name, (features, width), 0, slice(half * features, (half + 1) * features))
            for half, name in enumerate(first)
        ]
        parts.append((down, (width, features), 1, slice(0, None)))
        for place, expert in enumerate(self._here):
            for name, shape, part, rows in parts:
                placements[f"{self._name}.experts.{expert}.{name}.weight"] = (
                    Placement(shape, partial(self._store, part, place, rows))
                    if self._packing is None
                    else PackedPlacement(shape, partial(self._keep, (part, place, rows.start)))
                )
                if self._biases is not None:
                    placements[f"{self._name}.experts.{expert}.{name}.bias"] = Placement(
                        shape[:1], partial(self._store_bias, part, place, rows)
                    )
        return placements

    def __call__(self, x_TE: Activations, context: ForwardContext) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        assert not isinstance(x_TE, RoundedRows), "its router reads it as it is"
        assert self._experts is not None, f"experts of {self._name} were not loaded"
        logits_TX = self._router(x_TE.float() if self._widens else x_TE)
        if self._latent:
            x_TE = self._latent[0](x_TE)
        out_TE = self._ops.mixture_of_experts(
            x_TE, logits_TX, self._experts, self._routing, context.metadata[-1].slot_mapping_T
        )
        if self._all_reduce is not None:
            out_TE = self._ops.reduce(out_TE, self._all_reduce)
        return self._latent[1](out_TE) if self._latent else out_TE

    def _keep(self, key: tuple[int, int, int], weight: WeightPart) -> None:
        self._kept[key] = weight
        self._prepare_when_complete()

    def _store(
        self, part: int, place: int, rows: slice, tensor: torch.Tensor, copy: CopyWeight
    ) -> None:
        if self._fused is None:  # allocated on first use: only the layers being read exist
            self._fused = (self._new(self._gate_up_shape), self._new(self._down_shape))
        copy(self._fused[part][place, rows], tensor)
        self._prepare_when_complete()

    def _store_bias(
        self, part: int, place: int, rows: slice, tensor: torch.Tensor, copy: CopyWeight
    ) -> None:
        assert self._biases is not None
        copy(self._biases[part][place, rows], tensor)
        self._prepare_when_complete()

    def _prepare_when_complete(self) -> None:
        self._num_missing -= 1
        if self._num_missing:
            return
        how = self._activation, self._biases
        if self._packing is not None:
            gate_up, down = (
                [self._kept[key] for key in sorted(self._kept) if key[0] == part] for part in (0, 1)
            )
            self._kept.clear()
            self._experts = self._packing.pack_experts(self._name, gate_up, down, *how)
        else:
            assert self._fused is not None
            self._experts = self._ops.prepare_experts(*self._fused, *how)
        self._fused = self._biases = None

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._ops.device)


class SharedFeedForward:
    """Experts, and one that every token goes through, scaled by a gate of its own if there
    is one."""

    first = None  # router, experts and gate read the inputs

    def __init__(
        self, routed: SparseFeedForward, shared: DenseFeedForward, gate: FusedLinear | None
    ) -> None:
        self._routed = routed
        self._shared = shared
        self._gate = gate

    @property
    def linears(self) -> list[FusedLinear]:
        gate = [] if self._gate is None else [self._gate]
        return [*self._routed.linears, *self._shared.linears, *gate]

    def placements(self) -> Placements:
        parts = [self._routed.placements(), self._shared.placements()]
        return merge(parts if self._gate is None else [*parts, self._gate.placements()])

    def __call__(self, x_TE: Activations, context: ForwardContext) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        routed_TE, shared_TE = self._routed(x_TE, context), self._shared(x_TE, context)
        if self._gate is None:
            return routed_TE.add_(shared_TE)
        gate_TE = self._gate(x_TE).repeat_interleave(self._gate.num_inputs, 1)
        return routed_TE.add_(context.ops.gate(shared_TE, gate_TE, "sigmoid"))
