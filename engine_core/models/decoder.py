"""The decoder that Llama, Mistral, Mixtral, Qwen 2, Qwen 3 and Gemma 3 share: every difference
between the families is an option of ModelConfig. A layer, without and with output norms:

    hidden += attention(norm(hidden))          hidden += norm(attention(norm(hidden)))
    hidden += feed_forward(norm(hidden))       hidden += norm(feed_forward(norm(hidden)))
"""

import copy
import dataclasses
from collections.abc import Iterable
from functools import partial

import torch

from engine_core.devices import traits_of
from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.layers.attention import Attention
from engine_core.layers.feed_forward import GatedFeedForward, SparseFeedForward
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import Placements, merge
from engine_core.layers.rotary import RotaryConfig, RotaryTable, StepRotaryTable
from engine_core.layers.vocabulary import Vocabulary
from engine_core.models.config import ModelConfig
from engine_core.models.interface import KVCacheSpec
from engine_core.models.parallel.passed_states import PassedStates
from engine_core.models.parallel.stages import Stage
from kernels.interface.operations import (
    Activations,
    AllReduce,
    AttentionParams,
    ForwardContext,
    Operations,
    RotaryParams,
    RoundedRows,
)


class LayerBuilder:
    """Makes the parts of a decoder from its config. Layers with equal angles share a table.

    Args:
        config: of several ranks each has its own, see `Sharding`.
        num_positions: most rows of the tables of angles.
        collectives: of the ranks that share the layers.
        stage: of several, that these parts are of; None: there is one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        ops: Operations,
        num_positions: int,
        collectives: Collectives = SINGLE_RANK,
        stage: Stage | None = None,
    ) -> None:
        self._collectives = collectives
        self._config = config
        self._dtype = dtype
        self._ops = ops
        self._num_positions = num_positions
        self._stage = stage or Stage.whole(config)
        self.tables: dict[RotaryConfig, RotaryTable | StepRotaryTable] = {}

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """A norm of the hidden state, or of another size."""
        return RMSNorm(
            name,
            size or self._config.hidden_size,
            self._config.norm_eps,
            plus_one=self._config.norms_plus_one,
            dtype=self._dtype,
            ops=self._ops,
        )

    def attention(self, layer: int, *, num_inputs: int | None = None) -> Attention:
        """The attention of one layer. `num_inputs`: of its q, k and v; None: the hidden size."""
        config = self._config
        name = f"model.layers.{layer}.self_attn"
        query_size = config.num_query_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        norms = [
            self.norm(f"{name}.{norm}", config.head_size)
            for norm in (("q_norm", "k_norm") if config.head_norms else ())
        ]
        q_norm, k_norm = norms or (None, None)
        linear = partial(FusedLinear, dtype=self._dtype, ops=self._ops)
        return Attention(
            layer - self._stage.layers.start,
            qkv=linear(
                [
                    (f"{name}.q_proj", query_size),
                    (f"{name}.k_proj", kv_size),
                    (f"{name}.v_proj", kv_size),
                ],
                num_inputs or config.hidden_size,
                bias=config.qkv_bias,
            ),
            output=linear(
                [(f"{name}.o_proj", config.hidden_size)],
                query_size,
                bias=config.output_bias,
                all_reduce=self._all_reduce("attention"),
            ),
            head_norms=norms,
            rotary=RotaryParams(
                num_query_heads=config.num_query_heads,
                head_size=config.head_size,
                cos_sin_PD=self._table(config.rotary[layer]).cos_sin_PD,
                q_norm_weight_D=None if q_norm is None else q_norm.weight,
                k_norm_weight_D=None if k_norm is None else k_norm.weight,
                norm_eps=config.norm_eps,
            ),
            params=AttentionParams(
                scale=config.attention_scale, sliding_window=config.sliding_windows[layer]
            ),
        )

    def _all_reduce(self, part: str) -> AllReduce | None:
        if self._collectives.parallel.tp_size == 1:
            return None
        return partial(self._collectives.all_reduce_, part=part)

    def feed_forward(self, layer: int) -> GatedFeedForward | SparseFeedForward:
        """The feed-forward of one layer, dense or sparse."""
        experts = self._config.experts[layer]
        if experts is not None:
            return SparseFeedForward(
                f"model.layers.{layer}",
                experts,
                self._config.hidden_size,
                dtype=self._dtype,
                ops=self._ops,
                all_reduce=self._all_reduce("experts"),
            )
        return GatedFeedForward(
            f"model.layers.{layer}.mlp",
            self._config.hidden_size,
            self._config.intermediate_size,
            activation=self._config.activation,
            bias=self._config.mlp_bias,
            dtype=self._dtype,
            ops=self._ops,
            all_reduce=self._all_reduce("feed_forward"),
        )

    def vocabulary(self) -> Vocabulary:
        """Embedding and head, as far as the stage has them."""
        return Vocabulary(
            embedding_name="model.embed_tokens.weight",
            head_name="lm_head.weight",
            vocab_size=self._config.vocab_size,
            hidden_size=self._config.hidden_size,
            tied=self._config.tied_head,
            embedding_scale=self._config.embedding_scale,
            softcap=self._config.final_softcap,
            embeds=self._stage.is_first,
            heads=self._stage.is_last,
            dtype=self._dtype,
            ops=self._ops,
            collectives=self._collectives,
        )

    def _table(self, rotary: RotaryConfig) -> RotaryTable | StepRotaryTable:
        # without an encoder prompts are text, where all axes agree
        has_axes = rotary.sections and traits_of(self._ops.device).runs_any_module
        if rotary not in self.tables and has_axes:
            self.tables[rotary] = StepRotaryTable(
                rotary, limit=self._num_positions, dtype=self._dtype
            )
        elif rotary not in self.tables:
            self.tables[rotary] = RotaryTable(
                rotary, limit=self._num_positions, dtype=self._dtype, device=self._ops.device
            )
        return self.tables[rotary]


class DecoderLayer:
    """Attention and feed-forward with a norm before each, and one behind each where the config has
    output norms. The residual stream is the decoder's."""

    def __init__(self, build: LayerBuilder, layer: int, *, has_output_norms: bool) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = build.norm(f"{name}.input_layernorm")
        self.attention = build.attention(layer)
        self.feed_forward = build.feed_forward(layer)
        self._attention_norm: RMSNorm | None = None
        self._output_norm: RMSNorm | None = None
        after_attention = build.norm(f"{name}.post_attention_layernorm")
        if has_output_norms:
            self._attention_norm = after_attention
            self._output_norm = build.norm(f"{name}.post_feedforward_layernorm")
            self.feed_forward_norm = build.norm(f"{name}.pre_feedforward_layernorm")
        else:
            self.feed_forward_norm = after_attention

    def placements(self) -> Placements:
        parts = [self.attention.placements(), self.feed_forward.placements()]
        norms = (self.input_norm, self._attention_norm, self.feed_forward_norm, self._output_norm)
        return merge([*parts, *(norm.placements() for norm in norms if norm is not None)])

    def attend(self, q_THD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """What attention adds to the residual stream."""
        out_TE = self.attention.attend(q_THD, context)
        return out_TE if self._attention_norm is None else self._attention_norm(out_TE)

    def feed(self, x_TE: Activations, context: ForwardContext) -> torch.Tensor:
        """What the feed-forward adds to the residual stream, from its normed value."""
        if isinstance(self.feed_forward, SparseFeedForward):
            assert not isinstance(x_TE, RoundedRows), "its router reads it as it is"
            out_TE = self.feed_forward(x_TE, context.metadata[-1].slot_mapping_T)
        else:
            out_TE = self.feed_forward(x_TE)
        return out_TE if self._output_norm is None else self._output_norm(out_TE)


class Decoder:
    """See the module; implements `engine_core.models.interface.Model`.
    Arguments: see `LayerBuilder`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        ops: Operations,
        num_positions: int,
        collectives: Collectives = SINGLE_RANK,
        stage: Stage | None = None,
    ) -> None:
        self.stage = stage or Stage.whole(config)
        build = LayerBuilder(
            config,
            dtype=dtype,
            ops=ops,
            num_positions=num_positions,
            collectives=collectives,
            stage=self.stage,
        )
        self.kv_cache_spec: KVCacheSpec = config
        self.has_experts = any(experts is not None for experts in config.experts)
        self.vocabulary = build.vocabulary()
        self._layers = [
            DecoderLayer(build, layer, has_output_norms=config.output_norms)
            for layer in self.stage.layers
        ]
        self._final_norm = build.norm("model.norm") if self.stage.is_last else None
        self._passed = PassedStates(
            config.hidden_size, dtype=dtype, device=ops.device, collectives=collectives
        )
        self._tables = list(build.tables.values())
        self._ops = ops
        self._grows_tables = traits_of(ops.device).is_host
        self._forward = ops.capture(self._compute)
        self._num_positions: list[int] = []
        """Of each table, and of what another stage passes, when the pass was captured."""
        self._kept_layers: frozenset[int] = frozenset()
        self.states: tuple[torch.Tensor, ...] = ()
        """Of the last pass, [T, E] each: see `keep_states`."""

    def first_layers(self, num_layers: int) -> "Decoder":
        """Embedding, these layers, final norm and head as a model that shares their weights.
        Raises ValueError: there are not so many."""
        config = self.kv_cache_spec
        assert isinstance(config, ModelConfig)
        if not 1 <= num_layers <= config.num_layers:
            raise ValueError(f"{num_layers} of {config.num_layers} layers")
        first = copy.copy(self)
        first.kv_cache_spec = dataclasses.replace(
            config,
            num_layers=num_layers,
            sliding_windows=config.sliding_windows[:num_layers],
            experts=config.experts[:num_layers],
            rotary=config.rotary[:num_layers],
        )
        first._layers = self._layers[:num_layers]
        first.forget_caches()
        return first

    def keep_states(self, layers: Iterable[int]) -> None:
        """From now on each pass leaves the hidden states that enter these layers in `states`, by
        rising layer; behind the last one is the number of layers."""
        self._kept_layers = frozenset(layers)
        self.forget_caches()

    def forget_caches(self) -> None:
        """What was captured keeps the caches that it read."""
        self.states = ()
        self._forward = self._ops.capture(self._compute)

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        parts = [part for layer in self._layers for part in (layer.attention, layer.feed_forward)]
        return [linear for part in parts for linear in part.linears]

    @property
    def optional_names(self) -> frozenset[str]:
        """What the checkpoint may leave out."""
        return self.vocabulary.optional_names

    def finish_loading(self) -> None:
        """Once every tensor has come."""
        self.vocabulary.finish_loading()

    def placements(self) -> Placements:
        """Every tensor that the model takes, by checkpoint name."""
        parts = [self.vocabulary.placements(), *(layer.placements() for layer in self._layers)]
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
            rows_T = self.vocabulary.rows_of(token_ids_T)
        else:
            rows_T = self._passed.receive(len(positions_T))
        if self._grows_tables and len(positions_T):
            num_positions = int(positions_T.max()) + 1
            for table in self._tables:
                if isinstance(table, StepRotaryTable):
                    axes_AT = context.positions_AT
                    table.fill(positions_T[None] if axes_AT is None else axes_AT)
                    positions_T = torch.arange(len(positions_T))  # rows of this step's table
                else:
                    table.cover(num_positions)
            sizes = [len(table.cos_sin_PD) for table in self._tables]  # others may share them
            sizes.append(self._passed.capacity)
            if sizes != self._num_positions:
                self._num_positions = sizes
                self._forward = self._ops.capture(self._compute)  # which keeps addresses
        hidden_TE, *states = self._forward(rows_T, positions_T, context)
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
            embedded_TE = self.vocabulary.embed(rows_T)
            residual_TE = self._ops.replace_rows(embedded_TE, context.given)
        else:
            out_TE, residual_TE = self._passed.rows(rows_T, self._ops)
        states: list[torch.Tensor] = []
        x_TE: Activations
        for number, layer in enumerate(self._layers):
            if out_TE is None:
                x_TE = layer.input_norm(residual_TE)
            else:
                qkv = layer.attention.qkv
                x_TE, residual_TE = layer.input_norm.add_before(qkv, out_TE, residual_TE)
            if number in self._kept_layers:
                states.append(residual_TE.clone())  # it is written on
            q_THD = layer.attention.queries(x_TE, positions_T, context)
            if layer is self._layers[-1] and self._puts_out_rows:
                q_THD = self._ops.take_rows(q_THD, context.output)
                residual_TE = self._ops.take_rows(residual_TE, context.output)
                context = context.behind_take_rows
            out_TE = layer.attend(q_THD, context)
            norm, gate_up = layer.feed_forward_norm, layer.feed_forward.gate_up
            x_TE, residual_TE = norm.add_before(gate_up, out_TE, residual_TE)
            out_TE = layer.feed(x_TE, context)
        assert out_TE is not None
        if self._final_norm is None:
            return out_TE, residual_TE
        hidden_TE, residual_TE = self._final_norm.add(out_TE, residual_TE)
        if len(self._layers) in self._kept_layers:
            states.append(residual_TE.clone())
        return hidden_TE, *states

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.logits(hidden_RE)
