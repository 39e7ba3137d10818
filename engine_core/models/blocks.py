"""A layer of a decoder: a mixer of tokens and a feed-forward, with norms around them.

before    h += mixer(norm(h))              h += feed_forward(norm(h))
around    h += norm(mixer(norm(h)))        h += norm(feed_forward(norm(h)))
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal, Protocol

import torch

from engine_core.devices import traits_of
from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.layers.attention import Attention
from engine_core.layers.config import RotaryConfig
from engine_core.layers.feed_forward import GatedFeedForward, SparseFeedForward
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import Placements, merge
from engine_core.layers.rotary import RotaryTable, StepRotaryTable
from engine_core.layers.vocabulary import Vocabulary
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


class Part(Protocol):
    """A mixer or a feed-forward."""

    @property
    def first(self) -> FusedLinear | None:
        """The product that alone reads the inputs: the norm before it may round them for it. None:
        something else reads them, too."""

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""

    def placements(self) -> Placements: ...


class Mixer(Part, Protocol):
    """What lets tokens see each other, in two halves: of a model's last layer the second one is
    only for those tokens whose hidden states are read."""

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> what `finish` takes, a row a token; writes what the layer keeps."""

    def finish(self, begun_T: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Rows of `begin` -> [T, E]; reads what the layer keeps."""


class FeedForward(Part, Protocol):
    """What each token goes through alone."""

    def __call__(self, x_TE: Activations, context: ForwardContext, /) -> torch.Tensor:
        """[T, E] -> [T, E]."""


Norms = Literal["before", "around"]
_NORM_NAMES: dict[Norms, tuple[str | None, ...]] = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "around": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Before and behind the mixer, before and behind the feed-forward."""


class Block:
    """See the module. The residual stream is the decoder's.
    `norms`: before and behind the mixer, before and behind the feed-forward."""

    def __init__(
        self, mixer: Mixer, feed_forward: FeedForward, norms: Sequence[RMSNorm | None]
    ) -> None:
        self.mixer = mixer
        self.feed_forward = feed_forward
        mixer_norm, self._behind_mixer, feed_norm, self._behind_feed = norms
        assert mixer_norm is not None and feed_norm is not None
        self._mixer_norm, self._feed_norm = mixer_norm, feed_norm
        self._norms = [norm for norm in norms if norm is not None]

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [*self.mixer.linears, *self.feed_forward.linears]

    def placements(self) -> Placements:
        """Of both parts and the norms."""
        parts = [self.mixer.placements(), self.feed_forward.placements()]
        return merge([*parts, *(norm.placements() for norm in self._norms)])

    def enter(
        self, added_TE: torch.Tensor | None, residual_TE: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """What the layer before adds (None: this is the first one) and the residual stream ->
        (the mixer's inputs, the residual stream). Consumes both."""
        if added_TE is None:
            return self._mixer_norm(residual_TE), residual_TE
        return self._mixer_norm.add_before(self.mixer.first, added_TE, residual_TE)

    def finish(
        self, begun_T: torch.Tensor, residual_TE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the mixer has begun -> (what the layer adds at its end, the residual stream)."""
        out_TE = _normed(self._behind_mixer, self.mixer.finish(begun_T, context))
        x_TE, residual_TE = self._feed_norm.add_before(self.feed_forward.first, out_TE, residual_TE)
        return _normed(self._behind_feed, self.feed_forward(x_TE, context)), residual_TE


def _normed(norm: RMSNorm | None, x_TE: torch.Tensor) -> torch.Tensor:
    return x_TE if norm is None else norm(x_TE)


class BlockBuilder:
    """Makes the parts of a decoder from its config, for `ModelConfig.block` among others. Layers
    with equal angles share a table.

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

    def block(self, layer: int, mixer: Mixer, *, norms: Norms = "before") -> Block:
        """The layer of this number with its feed-forward, dense or sparse."""
        prefix = f"model.layers.{layer}"
        names = _NORM_NAMES[norms]
        made = [None if name is None else self.norm(f"{prefix}.{name}") for name in names]
        return Block(mixer, self.feed_forward(layer), made)

    def attention(
        self, layer: int, *, head_norms: bool = False, num_inputs: int | None = None
    ) -> Attention:
        """The attention of one layer.

        Args:
            head_norms: q and k are normed within a head before rotation.
            num_inputs: of q, k and v; None: the hidden size.
        """
        config = self._config
        name = f"model.layers.{layer}.self_attn"
        query_size = config.num_query_heads * config.head_size
        kv_size = config.num_kv_heads * config.head_size
        norms = [
            self.norm(f"{name}.{norm}", config.head_size)
            for norm in (("q_norm", "k_norm") if head_norms else ())
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
