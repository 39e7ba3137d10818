"""The layer of Gemma 4: norms around attention and feed-forward, then a number on what goes out.

h += norm(attention(norm(h)))    h += norm(feed_forward(norm(h)))    h *= scalar
"""

from collections.abc import Sequence

import torch

from engine_core.layers.norm import NoNorm, RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from engine_core.models.blocks import Begun, Block, BlockBuilder, FeedForward, Mixer
from kernels.interface.operations import ForwardContext


class ScaledBlock(Block):
    """A block whose residual stream is multiplied with a number at its end.
    `scalar`: float32 [1]. Other arguments: see `Block`."""

    def __init__(
        self,
        mixer: Mixer,
        feed_forward: FeedForward,
        norms: Sequence[RMSNorm | None],
        *,
        no_norm: NoNorm,
        scalar: Parameter,
    ) -> None:
        super().__init__(mixer, feed_forward, norms, no_norm=no_norm)
        self._scalar = scalar

    def placements(self) -> Placements:
        return merge([super().placements(), self._scalar.placements()])

    def finish(
        self, begun: Begun, residual_TE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Block.finish`: both are multiplied, as their sum is the stream."""
        out_TE, residual_TE = super().finish(begun, residual_TE, context)
        return out_TE.mul_(self._scalar.tensor), residual_TE.mul_(self._scalar.tensor)


_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def scaled_block(
    build: BlockBuilder, layer: int, mixer: Mixer, feed_forward: FeedForward
) -> ScaledBlock:
    """The layer of this number."""
    name, device = f"model.layers.{layer}", build.ops.device
    return ScaledBlock(
        mixer,
        feed_forward,
        [build.norm(f"{name}.{norm}") for norm in _NORMS],
        no_norm=NoNorm(build.config.spec.hidden_size, dtype=build.dtype, ops=build.ops),
        scalar=Parameter(f"{name}.layer_scalar", (1,), torch.float32, device=device),
    )
