"""The decoder that all families share: embedding, blocks, norm and head. What a block is, a family
says (`ModelConfig.block`)."""

import copy
import dataclasses
from collections.abc import Iterable
from typing import get_args

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Placements, merge
from engine_core.layers.rotary import StepRotaryTable
from engine_core.models.blocks.block import Begun, Block, BlockBuilder
from engine_core.models.interface import Feature, Model, ModelSpec, ProductsOf
from engine_core.models.parallel.passed_states import PassedStates
from kernels.interface.operations import ForwardContext


def decoder_of(model: Model, feature: Feature) -> "Decoder":
    """The model as the code that has this feature; what does not is refused at start."""
    assert feature in model.supports and isinstance(model, Decoder), f"no {feature}: not refused"
    return model


class Decoder:
    """See the module; implements `engine_core.models.interface.Model`.
    `products_of`: the way of its checkpoint's names."""

    supports: frozenset[Feature] = frozenset(get_args(Feature))

    def __init__(self, build: BlockBuilder, products_of: ProductsOf) -> None:
        config, ops = build.config, build.ops
        self.stage = build.stage
        self.config, self.products_of = config, products_of
        self.spec: ModelSpec = config.spec
        self.supports -= config.lacks
        self.has_experts = any(experts is not None for experts in config.experts)
        self.vocabulary = build.vocabulary()
        self._blocks: list[Block] = [config.block(build, layer) for layer in self.stage.layers]
        self._final_norm = build.hidden_norm("model.norm") if self.stage.is_last else None
        self._passed = PassedStates(
            config.spec.hidden_size,
            dtype=build.dtype,
            device=ops.device,
            collectives=build.collectives,
        )
        self._tables = list(build.tables.values())
        self._grows_tables = build.grows_tables
        self._ops = ops
        self._forward = ops.capture(self._compute)
        self._num_positions: list[int] = []
        """Positions of each table, and of what another stage passes, when the pass was captured."""
        self._kept_layers: frozenset[int] = frozenset()
        self.states: tuple[torch.Tensor, ...] = ()
        """Hidden states that the last pass has left, [T, E] each: see `keep_states`."""

    def first_layers(self, num_layers: int) -> "Decoder":
        """Embedding, these layers, final norm and head as a model that shares their weights.
        Raises ValueError: there are not so many."""
        config, spec = self.config, self.spec
        if not 1 <= num_layers <= spec.num_layers:
            raise ValueError(f"{num_layers} of {spec.num_layers} layers")
        first = copy.copy(self)
        first.spec = dataclasses.replace(spec, layers=spec.layers[:num_layers])
        first.config = dataclasses.replace(
            config,
            spec=first.spec,
            experts=config.experts[:num_layers],
            rotary=config.rotary[:num_layers],
        )
        first._blocks = self._blocks[:num_layers]
        first.forget_caches()
        return first

    def keep_states(self, layers: Iterable[int]) -> None:
        """From now on each pass leaves the hidden states that enter these layers in `states`, by
        rising layer; behind the last one is the number of layers, behind its norm one more."""
        self._kept_layers = frozenset(layers)
        self.forget_caches()

    def forget_caches(self) -> None:
        """Capture the pass anew: what was captured keeps the caches that it read."""
        self.states = ()
        self._forward = self._ops.capture(self._compute)

    @property
    def linears(self) -> list[FusedLinear]:
        of_blocks = [linear for block in self._blocks for linear in block.linears]
        return self.vocabulary.linears + of_blocks

    @property
    def optional_names(self) -> frozenset[str]:
        """Names of the tensors that the checkpoint may leave out."""
        return self.vocabulary.optional_names

    def finish_loading(self) -> None:
        """Once every tensor has come."""
        self.vocabulary.finish_loading()

    def placements(self) -> Placements:
        """Every tensor that the model takes, by checkpoint name."""
        parts = [self.vocabulary.placements(), *(block.placements() for block in self._blocks)]
        if self._final_norm is not None:
            parts.append(self._final_norm.placements())
        return merge(parts)

    @property
    def _puts_out_rows(self) -> bool:
        """Whether a pass gives hidden states to those of the context's output rows alone."""
        return self._final_norm is not None and not self._kept_layers

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        if self.stage.is_first:
            rows_T = self.vocabulary.rows_of(token_ids_T, context.given)
        else:
            rows_T = self._passed.receive(len(positions_T))
        axes_AT = context.positions_AT
        if self._grows_tables and len(positions_T):
            num_positions = int(positions_T.max()) + 1
            for table in self._tables:
                if isinstance(table, StepRotaryTable):
                    positions_T = table.fill(positions_T[None] if axes_AT is None else axes_AT)
                else:
                    table.cover(num_positions)
            sizes = [len(table.cos_sin_PD) for table in self._tables]  # others may share them
            sizes.append(self._passed.capacity)
            if sizes != self._num_positions:
                self._num_positions = sizes
                self._forward = self._ops.capture(self._compute)  # which keeps addresses
        elif axes_AT is not None:
            for table in self._tables:
                positions_T = table.fill(axes_AT)
        forward = self._compute if context.added else self._forward
        hidden_TE, *states = forward(rows_T, positions_T, context)
        if not self.stage.is_last:
            self._passed.send(hidden_TE, *states)
            return hidden_TE
        self.states = tuple(states)
        return hidden_TE

    def _compute(
        self, rows_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, ...]:
        """What `forward` consists of; `Operations.capture` says what it may do."""
        out_TE: torch.Tensor | None = None
        if self.stage.is_first:
            residual_TE = self.vocabulary.begin(rows_T, context.given)
        else:
            out_TE, residual_TE = self._passed.rows(rows_T, self._ops)
        states: list[torch.Tensor] = []
        for number, block in enumerate(self._blocks):
            x_TE, residual_TE = block.enter(out_TE, residual_TE)
            if number in self._kept_layers:
                states.append(residual_TE.clone())  # it is written on
            begun = block.mixer.begin(x_TE, positions_T, context)
            if block is self._blocks[-1] and self._puts_out_rows:
                begun = self._taken(begun, context)
                residual_TE = self._ops.take_rows(residual_TE, context.output)
                context = context.behind_take_rows
            out_TE, residual_TE = block.finish(begun, residual_TE, context)
            if number < len(context.added):
                added = context.added[number]
                out_TE = out_TE.index_add(0, added.places_N, added.rows_NE)
        assert out_TE is not None
        if self._final_norm is None:
            return out_TE, residual_TE
        hidden_TE, residual_TE = self._final_norm.add(out_TE, residual_TE)
        if len(self._blocks) in self._kept_layers:
            states.append(residual_TE.clone())
        if len(self._blocks) + 1 in self._kept_layers:
            states.append(hidden_TE)
        return hidden_TE, *states

    def _taken(self, begun: Begun, context: ForwardContext) -> Begun:
        """The output rows of what a mixer has begun."""
        if isinstance(begun, tuple):
            return tuple([self._ops.take_rows(each, context.output) for each in begun])
        return self._ops.take_rows(begun, context.output)

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.logits(hidden_RE)
