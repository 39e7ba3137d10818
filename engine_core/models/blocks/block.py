"""A layer of a decoder: a mixer of tokens and a feed-forward, with norms around them.

before    h += mixer(norm(h))              h += feed_forward(norm(h))
around    h += norm(mixer(norm(h)))        h += norm(feed_forward(norm(h)))
behind    h += norm(mixer(h))              h += norm(feed_forward(h))
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from engine_core.devices import traits_of
from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.layers.attention import Attention, KeysAsValues, NormedProjections
from engine_core.layers.config import RotaryConfig
from engine_core.layers.feed_forward import (
    DenseFeedForward,
    SharedFeedForward,
    SparseFeedForward,
)
from engine_core.layers.indexer import Indexer
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import LayerNorm, NoNorm, RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from engine_core.layers.per_layer import PerLayerInputs
from engine_core.layers.rotary import RotaryTable, StepRotaryTable
from engine_core.layers.vocabulary import Vocabulary
from engine_core.models.blocks.mixers import Begun as Begun
from engine_core.models.blocks.mixers import FeedForward, FeedForwardAlone, Mixer
from engine_core.models.config import ModelConfig
from engine_core.models.parallel.stages import Stage
from kernels.interface.operations import (
    Activations,
    AllReduce,
    AttentionParams,
    ForwardContext,
    Operations,
    RotaryParams,
)

HiddenNorm = RMSNorm | LayerNorm
Norms = Literal["before", "around", "behind"]
_NORM_NAMES: dict[Norms, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "behind": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}
"""Before and behind the mixer, before and behind the feed-forward."""


class Block:
    """See the module. The residual stream is the decoder's.

    Args:
        feed_forward: None: the mixer is all.
        norms: before and behind the mixer, before and behind the feed-forward.
        no_norm: where there is none before one of them.
        residual_scale: on what both add; None: 1.
    """

    def __init__(
        self,
        mixer: Mixer,
        feed_forward: FeedForward | None,
        norms: Sequence[HiddenNorm | None],
        *,
        no_norm: NoNorm,
        residual_scale: torch.Tensor | None = None,
    ) -> None:
        self.mixer = mixer
        self.feed_forward = feed_forward
        self._mixer_norm, self._feed_norm = norms[0] or no_norm, norms[2] or no_norm
        self._behind_mixer, self._behind_feed = norms[1], norms[3]
        self._scale = residual_scale
        self._norms = [norm for norm in norms if norm is not None]

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [linear for part in self._parts for linear in part.linears]

    def placements(self) -> Placements:
        return merge([part.placements() for part in [*self._parts, *self._norms]])

    @property
    def _parts(self) -> list[Mixer | FeedForward]:
        return [self.mixer] if self.feed_forward is None else [self.mixer, self.feed_forward]

    def enter(
        self, added_TE: torch.Tensor | None, residual_TE: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """What the layer before adds (None: this is the first one) and the residual stream ->
        (the mixer's inputs, the residual stream). Consumes both."""
        if added_TE is None:
            return self._mixer_norm(residual_TE), residual_TE
        return self._mixer_norm.add_before(self.mixer.first, added_TE, residual_TE)

    def finish(
        self, begun: Begun, residual_TE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the mixer has begun -> (what the layer adds at its end, the residual stream)."""
        out_TE = self._added(self._behind_mixer, self.mixer.finish(begun, context))
        if self.feed_forward is None:
            return out_TE, residual_TE
        x_TE, residual_TE = self._feed_norm.add_before(self.feed_forward.first, out_TE, residual_TE)
        return self._added(self._behind_feed, self.feed_forward(x_TE, context)), residual_TE

    def _added(self, norm: HiddenNorm | None, out_TE: torch.Tensor) -> torch.Tensor:
        out_TE = out_TE if norm is None else norm(out_TE)
        return out_TE if self._scale is None else out_TE.mul_(self._scale)


class BlockBuilder:
    """Makes the parts of a decoder from its config, for `ModelConfig.block` among others: a family
    may also make a mixer of its own from what is here. Layers with equal angles share a table.

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
        self.collectives = collectives
        self.config = config
        self.dtype = dtype
        self.ops = ops
        self._num_positions = num_positions
        self.stage = stage or Stage.whole(config)
        self.tables: dict[RotaryConfig, RotaryTable | StepRotaryTable] = {}
        self.grows_tables = traits_of(ops.device).is_host
        """Whether tables have the rows that steps have needed so far, or all from the start on."""
        self.per_layer = self._per_layer_inputs()
        self.indexer: Indexer | None = None  # of the last layer so far that has one

    def _per_layer_inputs(self) -> PerLayerInputs | None:
        """What tokens give to each layer, of a model that has such embeddings."""
        if (config := self.config.per_layer) is None:
            return None
        return PerLayerInputs(
            config,
            self.config.spec.num_layers,
            self.config.spec.hidden_size,
            norm=self.norm("model.per_layer_projection_norm", config.size),
            dtype=self.dtype,
            ops=self.ops,
        )

    def place(self, layer: int) -> int:
        """Index into a step's caches and metadata; a state beside keys has the place before."""
        spec = self.config.spec
        return spec.places(range(layer + 1))[-1] - spec.places(self.stage.layers).start

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """An RMS norm of the hidden state, or of another size."""
        return RMSNorm(
            name,
            size or self.config.spec.hidden_size,
            self.config.norm_eps,
            plus_one=self.config.norms_plus_one,
            in_float32=self.config.norms_in_float32,
            dtype=self.dtype,
            ops=self.ops,
        )

    def hidden_norm(self, name: str) -> HiddenNorm:
        """A norm of the hidden state, of the kind that the model has."""
        if (bias := self.config.norm_bias) is None:
            return self.norm(name)
        size, eps = self.config.spec.hidden_size, self.config.norm_eps
        how = {"bias": bias, "plus_one": self.config.norms_plus_one}
        return LayerNorm(name, size, eps, **how, dtype=self.dtype, ops=self.ops)

    def no_norm(self) -> NoNorm:
        """Adds to the hidden state where there is no norm."""
        return NoNorm(self.config.spec.hidden_size, dtype=self.dtype, ops=self.ops)

    def block(
        self,
        layer: int,
        mixer: Mixer,
        feed_forward: FeedForward | None = None,
        *,
        norms: Norms = "before",
    ) -> Block:
        """The layer of this number. `feed_forward`: None: dense, or experts."""
        scale = self.config.residual_scale
        prefix = f"model.layers.{layer}"
        names = _NORM_NAMES[norms]
        made = [None if name is None else self.hidden_norm(f"{prefix}.{name}") for name in names]
        return Block(
            mixer,
            feed_forward or self.feed_forward(layer),
            made,
            no_norm=self.no_norm(),
            # of the host and float32: not rounded to the model's dtype before it is multiplied
            residual_scale=None if scale == 1.0 else torch.tensor(scale),
        )

    def feed_forward_alone(self, layer: int) -> FeedForwardAlone:
        """The feed-forward of a layer that has no mixer."""
        return FeedForwardAlone(self.feed_forward(layer))

    def part_alone(self, layer: int, part: Mixer, norm: str) -> Block:
        """A layer of one part, with a norm of this name before it."""
        norms = [self.hidden_norm(f"model.layers.{layer}.{norm}"), None, None, None]
        return Block(part, None, norms, no_norm=self.no_norm())

    def attention(
        self,
        layer: int,
        *,
        head_norms: bool = False,
        all_head_norms: bool = False,
        norms_values: bool = False,
        keys_are_values: bool = False,
        fused: str | None = None,
        num_inputs: int | None = None,
        sinks: bool = False,
    ) -> Attention:
        """The attention of one layer.

        Args:
            head_norms: q and k are normed within a head before rotation.
            all_head_norms: they are normed over all heads.
            norms_values: v is normed within a head, without weight.
            keys_are_values: before their norms and the rotation.
            fused: the name of the one tensor that holds q, k and v.
            num_inputs: of q, k and v; None: the hidden size.
            sinks: each head has a learned score that takes part in its softmax.
        """
        config = self.config
        name = f"model.layers.{layer}.self_attn"
        keys, num_query_heads = config.spec.keys_of(layer), config.spec.num_query_heads
        parts = [("q_proj", num_query_heads * keys.key_size)]
        if keys.shares is None:
            parts.append(("k_proj", keys.num_kv_heads * keys.key_size))
            if not keys_are_values:
                parts.append(("v_proj", keys.num_kv_heads * keys.value_size))
        norms = [
            self.norm(f"{name}.{norm}", keys.key_size)
            for norm in (("q_norm", "k_norm")[: len(parts)] if head_norms else ())
        ]
        q_norm, k_norm = (*norms, None, None)[:2]
        linear = partial(FusedLinear, dtype=self.dtype, ops=self.ops)
        if fused is not None:
            parts = [(fused, sum(size for _, size in parts))]
        named = [(f"{name}.{part}", size) for part, size in parts]
        inputs = num_inputs or config.spec.hidden_size
        qkv: FusedLinear | NormedProjections | KeysAsValues
        if all_head_norms:
            qkv = NormedProjections(
                [linear([part], inputs, bias=config.qkv_bias) for part in named],
                [
                    self.norm(f"{name}.{norm}", size)
                    for norm, (_, size) in zip(("q_norm", "k_norm"), parts, strict=False)
                ],
            )
        else:
            qkv = linear(named, inputs, bias=config.qkv_bias)
        if keys_are_values and isinstance(qkv, FusedLinear) and len(named) == 2:
            qkv = KeysAsValues(qkv, (named[0][1], named[1][1]))
        norms_values = norms_values and keys.shares is None
        sink = None
        if sinks:
            shape, device = (num_query_heads,), self.ops.device
            sink = Parameter(f"{name}.sinks", shape, torch.float32, device=device)
        return Attention(
            self.place(layer),
            keeps_keys=keys.shares is None,
            qkv=qkv,
            output=linear(
                [(f"{name}.o_proj", config.spec.hidden_size)],
                num_query_heads * keys.value_size,
                bias=config.output_bias,
                all_reduce=self.all_reduce("attention"),
            ),
            head_norms=norms,
            rotary=RotaryParams(
                num_query_heads=num_query_heads,
                head_size=keys.key_size,
                cos_sin_PD=self.table(config.rotary[layer]).cos_sin_PD,
                q_norm_weight_D=None if q_norm is None else q_norm.weight,
                k_norm_weight_D=None if k_norm is None else k_norm.weight,
                v_norm_weight_D=torch.ones_like(norms[0].weight) if norms_values else None,
                norm_eps=config.norm_eps,
            ),
            params=AttentionParams(
                scale=config.attention_scale or keys.key_size**-0.5,
                sliding_window=keys.window,
                softcap=config.attention_softcap,
                sinks_H=None if sink is None else sink.tensor,
            ),
            query_scale=config.query_scale,
            sinks=sink,
        )

    def all_reduce(self, part: str) -> AllReduce | None:
        """What sums outputs over the ranks. `part`: of the model, which it is counted for."""
        if self.collectives.parallel.tp_size == 1:
            return None
        return partial(self.collectives.all_reduce_, part=part)

    def feed_forward(
        self, layer: int, halves: Sequence[str] = (), size: int | None = None
    ) -> FeedForward:
        """The feed-forward of one layer, dense or of experts; for `halves` see
        `DenseFeedForward`. `size`: of a dense one; None: the config's."""
        experts = self.config.experts[layer]
        if experts is None:
            size = size or self.config.intermediate_size
            return self._dense(f"model.layers.{layer}.mlp", size, halves)
        routed = SparseFeedForward(
            f"model.layers.{layer}",
            experts,
            self.config.spec.hidden_size,
            dtype=self.dtype,
            ops=self.ops,
            all_reduce=self.all_reduce("experts"),
        )
        if experts.shared_size is None:
            return routed
        name = f"model.layers.{layer}.{experts.shared_name}"
        shared = self._dense(name, experts.shared_size)
        if not experts.gates_shared:
            return SharedFeedForward(routed, shared, None)
        named, width = [(f"{name}_gate", 1)], self.config.spec.hidden_size
        gate = FusedLinear(named, width, bias=False, dtype=self.dtype, ops=self.ops, least_bits=32)
        return SharedFeedForward(routed, shared, gate)

    def _dense(self, name: str, size: int, halves: Sequence[str] = ()) -> DenseFeedForward:
        return DenseFeedForward(
            name,
            self.config.spec.hidden_size,
            size,
            activation=self.config.activation,
            bias=self.config.mlp_bias,
            halves=halves,
            gated=self.config.mlp_gated,
            dtype=self.dtype,
            ops=self.ops,
            all_reduce=self.all_reduce("feed_forward"),
        )

    def vocabulary(self) -> Vocabulary:
        """Embedding and head, as far as the stage has them."""
        return Vocabulary(
            embedding_name="model.embed_tokens.weight",
            head_name="lm_head.weight",
            vocab_size=self.config.spec.vocab_size,
            hidden_size=self.config.spec.hidden_size,
            tied=self.config.tied_head,
            embedding_scale=self.config.embedding_scale,
            softcap=self.config.final_softcap,
            logits_divisor=self.config.logits_divisor,
            embeds=self.stage.is_first,
            heads=self.stage.is_last,
            dtype=self.dtype,
            ops=self.ops,
            collectives=self.collectives,
            per_layer=self.per_layer,
        )

    def table(self, rotary: RotaryConfig) -> RotaryTable | StepRotaryTable:
        """The table of these angles, which layers share."""
        if rotary not in self.tables and rotary.sections and self.grows_tables:
            self.tables[rotary] = StepRotaryTable(
                rotary, limit=self._num_positions, dtype=self.dtype
            )
        elif rotary not in self.tables:
            self.tables[rotary] = RotaryTable(
                rotary, limit=self._num_positions, dtype=self.dtype, device=self.ops.device
            )
        return self.tables[rotary]
