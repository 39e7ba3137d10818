"""A layer whose residual stream goes through its norms, with factors on what is added:

h = norm(x);  h = norm(a h + b mixer(h));  x = c h + d feed_forward(h)
"""

import torch

from engine_core.models.blocks.block import Begun, Block, BlockBuilder
from engine_core.models.blocks.mixers import Mixer
from kernels.interface.operations import Activations, ForwardContext


class PostNormBlock(Block):
    """`factors`: a, b, c and d of the module."""

    def __init__(
        self,
        build: BlockBuilder,
        layer: int,
        mixer: Mixer,
        factors: tuple[float, float, float, float],
    ) -> None:
        names = ("input_layernorm", "post_attention_layernorm")
        self._first_norm, self._second_norm = (
            build.norm(f"model.layers.{layer}.{name}") for name in names
        )
        norms = [self._first_norm, None, self._second_norm, None]
        super().__init__(mixer, build.feed_forward(layer), norms, no_norm=build.no_norm())
        # of the host and float32, as a block's `residual_scale`
        self._factors = [None if factor == 1.0 else torch.tensor(factor) for factor in factors]

    def enter(
        self, added_TE: torch.Tensor | None, residual_TE: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        if added_TE is None:
            normed_TE = self._first_norm(residual_TE)
        else:
            normed_TE, _ = self._first_norm.add(added_TE, residual_TE)
        return normed_TE, _times(normed_TE.clone(), self._factors[0])

    def finish(
        self, begun: Begun, residual_TE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.feed_forward is not None
        _, of_mixer, kept, of_feed = self._factors
        out_TE = _times(self.mixer.finish(begun, context), of_mixer)
        normed_TE, _ = self._second_norm.add(out_TE, residual_TE)
        residual_TE = _times(normed_TE.clone(), kept)
        return _times(self.feed_forward(normed_TE, context), of_feed), residual_TE


def _times(x_TE: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x_TE if factor is None else x_TE.mul_(factor)
