"""The layer of Gemma 4: norms around attention and feed-forward, which may have experts beside it
(`layers/gemma_experts.py`), then what it adds of its own inputs (`layers/per_layer.py`), if it has
any, and a number on what goes out.

h += norm(attention(norm(h)))    h += norm(feed_forward(norm(h)))    h += inputs    h *= scalar
"""

from collections.abc import Sequence

import torch

from engine_core.layers.config import ExpertConfig
from engine_core.layers.feed_forward import DenseFeedForward
from engine_core.layers.gemma_experts import ExpertsBesideDense
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import NoNorm, RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from engine_core.layers.per_layer import LayerInputAdder, PerLayerInputs
from engine_core.models.blocks.block import Block, BlockBuilder
from engine_core.models.blocks.mixers import Begun, FeedForward, Mixer
from kernels.interface.operations import Activations, ForwardContext


class MixerWithInput:
    """A mixer that hands on the layer's inputs, so that of a model's last layer those of the
    tokens that are read are taken. `layer`: of the model."""

    def __init__(self, mixer: Mixer, inputs: PerLayerInputs, layer: int) -> None:
        self._mixer, self._inputs, self._layer = mixer, inputs, layer
        self.first = mixer.first

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return self._mixer.linears

    def placements(self) -> Placements:
        return self._mixer.placements()

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, E] -> (what the mixer has begun, the layer's inputs [T, P])."""
        return self._mixer.begin(x_TE, positions_T, context), self._inputs.of(self._layer)

    def finish(
        self, begun: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """(What the mixer has begun, the layer's inputs) -> [T, E]."""
        return self._mixer.finish(begun[0], context)


class ScaledBlock(Block):
    """A block whose residual stream is multiplied with a number at its end.
    `scalar`: float32 [1]. `adder`: of the layer's inputs, if it has any; the mixer hands them on.
    Other arguments: see `Block`."""

    def __init__(
        self,
        mixer: Mixer,
        feed_forward: FeedForward,
        norms: Sequence[RMSNorm | None],
        *,
        no_norm: NoNorm,
        scalar: Parameter,
        adder: LayerInputAdder | None,
    ) -> None:
        super().__init__(mixer, feed_forward, norms, no_norm=no_norm)
        self._no_norm = no_norm
        self._scalar = scalar
        self._adder = adder

    @property
    def linears(self) -> list[FusedLinear]:
        return super().linears + (self._adder.linears if self._adder else [])

    def placements(self) -> Placements:
        own = [super().placements(), self._scalar.placements()]
        return merge(own + ([self._adder.placements()] if self._adder else []))

    def finish(
        self, begun: Begun, residual_TE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Block.finish`: both are multiplied, as their sum is the stream."""
        out_TE, residual_TE = super().finish(begun, residual_TE, context)
        if self._adder is not None:
            _, residual_TE = self._no_norm.add_before(None, out_TE, residual_TE)
            out_TE = self._adder(residual_TE, begun[1])
        return out_TE.mul_(self._scalar.tensor), residual_TE.mul_(self._scalar.tensor)


NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def layer_input_adder(build: BlockBuilder, layer: int) -> LayerInputAdder:
    """What the layer adds of its inputs, of a model with embeddings per layer."""
    name, config = f"model.layers.{layer}", build.config
    assert config.per_layer is not None
    return LayerInputAdder(
        name,
        config.per_layer.size,
        config.spec.hidden_size,
        activation=config.activation,
        norm=build.norm(f"{name}.post_per_layer_input_norm"),
        dtype=build.dtype,
        ops=build.ops,
    )


_OF_DENSE = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1")
_OF_EXPERTS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


def experts_beside_dense(
    build: BlockBuilder, layer: int, experts: ExpertConfig
) -> ExpertsBesideDense:
    """The feed-forward of a layer with experts; it norms what it reads."""
    name, config = f"model.layers.{layer}", build.config
    return ExpertsBesideDense(
        name,
        experts,
        config.spec.hidden_size,
        dense=DenseFeedForward(
            f"{name}.mlp",
            config.spec.hidden_size,
            config.intermediate_size,
            activation=config.activation,
            bias=False,
            dtype=build.dtype,
            ops=build.ops,
        ),
        norms=[build.norm(f"{name}.{norm}") for norm in (*_OF_DENSE, *_OF_EXPERTS)],
        eps=config.norm_eps,
        dtype=build.dtype,
        ops=build.ops,
    )


def scaled_block(build: BlockBuilder, layer: int, mixer: Mixer, width: int) -> ScaledBlock:
    """The layer of this number. `width`: features of a dense feed-forward."""
    experts = build.config.experts[layer]
    feed_forward: FeedForward
    norms = [build.norm(f"model.layers.{layer}.{norm}") for norm in NORMS]
    of_block: list[RMSNorm | None] = [*norms]
    if experts is None:
        feed_forward = build.feed_forward(layer, size=width)
    else:
        feed_forward = experts_beside_dense(build, layer, experts)
        of_block[2] = None
    name, config = f"model.layers.{layer}", build.config
    adder = None
    if build.per_layer is not None:
        mixer = MixerWithInput(mixer, build.per_layer, layer)
        adder = layer_input_adder(build, layer)
    return ScaledBlock(
        mixer,
        feed_forward,
        of_block,
        no_norm=NoNorm(config.spec.hidden_size, dtype=build.dtype, ops=build.ops),
        scalar=Parameter(f"{name}.layer_scalar", (1,), torch.float32, device=build.ops.device),
        adder=adder,
    )
