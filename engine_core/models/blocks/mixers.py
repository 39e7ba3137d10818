"""The parts of a layer, as the layer asks: a mixer of tokens and a feed-forward."""

from typing import Any, Protocol

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Placements, merge
from kernels.interface.operations import Activations, ForwardContext, RoundedRows


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


Begun = Any
"""What a mixer has begun: a tensor with a row a token, or several such in a tuple."""


class Mixer(Part, Protocol):
    """What lets tokens see each other, in two halves: of a model's last layer the second one is
    only for those tokens whose hidden states are read."""

    def begin(self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext) -> Begun:
        """[T, E] -> what `finish` takes; writes what the layer keeps."""

    def finish(self, begun: Begun, context: ForwardContext) -> torch.Tensor:
        """Rows of `begin` -> [T, E]; reads what the layer keeps."""


class FeedForward(Part, Protocol):
    """The part of a block that each token goes through alone."""

    def __call__(self, x_TE: Activations, context: ForwardContext, /) -> torch.Tensor:
        """[T, E] -> [T, E]."""


class ParallelMixer:
    """A mixer and a feed-forward that read the same inputs, and whose outputs are one sum."""

    first = None  # both read the inputs

    def __init__(self, mixer: Mixer, feed_forward: FeedForward) -> None:
        self._mixer, self._feed_forward = mixer, feed_forward

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [*self._mixer.linears, *self._feed_forward.linears]

    def placements(self) -> Placements:
        return merge([self._mixer.placements(), self._feed_forward.placements()])

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[Begun, torch.Tensor]:
        """[T, E] -> (what the mixer beside the feed-forward has begun, the inputs of both)."""
        assert not isinstance(x_TE, RoundedRows), "rounded for no product"
        return self._mixer.begin(x_TE, positions_T, context), x_TE

    def finish(self, begun: tuple[Begun, torch.Tensor], context: ForwardContext) -> torch.Tensor:
        """Rows of `begin` -> [T, E]."""
        mixed_TE = self._mixer.finish(begun[0], context)
        return mixed_TE.add_(self._feed_forward(begun[1], context))


class FeedForwardAlone:
    """A feed-forward as the mixer of a layer that has no other part."""

    first = None  # `begin` hands the inputs on: the last layer computes some rows alone

    def __init__(self, feed_forward: FeedForward) -> None:
        self._feed_forward = feed_forward

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return self._feed_forward.linears

    def placements(self) -> Placements:
        return self._feed_forward.placements()

    def begin(
        self, x_TE: Activations, _positions_T: torch.Tensor, _context: ForwardContext
    ) -> torch.Tensor:
        """[T, E], as it is."""
        assert not isinstance(x_TE, RoundedRows), "rounded for no product"
        return x_TE

    def finish(self, begun_T: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self._feed_forward(begun_T, context)
