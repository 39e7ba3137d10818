"""A short convolution between two gates, which stands in the place of attention (LFM2)."""

from functools import partial

import torch

from engine_core.layers.convolution import Convolution
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Placements, merge
from kernels.interface.operations import Activations, ForwardContext, Operations
from kernels.interface.recurrence import RecurrenceShape


def short_convolution_shape(hidden_size: int, width: int) -> RecurrenceShape:
    """What it keeps: a convolution's inputs alone. `width`: tokens that it sees."""
    return RecurrenceShape(
        num_key_heads=0,
        num_heads=0,
        key_size=0,
        value_size=0,
        num_channels=hidden_size,
        width=width,
        dtype=torch.float32,
    )


class ShortConvolution:
    """`B, C, x = in_proj(h);  out_proj(C * convolution(B * x))`.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
        bias: whether products and convolution have one.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        shape: RecurrenceShape,
        *,
        bias: bool,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._size, self._ops = shape.num_channels, ops
        linear = partial(FusedLinear, num_inputs=self._size, bias=bias, dtype=dtype, ops=ops)
        self.first = linear([(f"{name}.in_proj", 3 * self._size)])
        self._output = linear([(f"{name}.out_proj", self._size)])
        self._convolution = Convolution(
            f"{name}.conv", layer, shape, bias=bias, silu=False, ops=ops
        )

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self.first, self._output]

    def placements(self) -> Placements:
        products = [self.first.placements(), self._output.placements()]
        return merge([*products, self._convolution.placements()])

    def begin(
        self, x_TE: Activations, _positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; keeps the convolution's inputs."""
        before_TE, behind_TE, in_TE = self.first(x_TE).split([self._size] * 3, 1)  # type: ignore[no-untyped-call]
        seen_TE = self._convolution(self._ops.gate(in_TE, before_TE, None), context)
        return self._ops.gate(seen_TE, behind_TE, None)

    def finish(self, gated_TE: torch.Tensor, _context: ForwardContext) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self._output(gated_TE)
