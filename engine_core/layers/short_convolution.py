"""A short convolution between two gates, which stands in the place of attention (LFM2)."""

from functools import partial

import torch

from engine_core.layers.config import ShortConvolutionConfig
from engine_core.layers.convolution import Convolution
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Placements, merge
from kernels.interface.operations import Activations, AllReduce, ForwardContext, Operations


class ShortConvolution:
    """`B, C, x = in_proj(h);  out_proj(C * convolution(B * x))`.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
        all_reduce: see `FusedLinear`, of the output.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        config: ShortConvolutionConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        ops: Operations,
        all_reduce: AllReduce | None = None,
    ) -> None:
        self._size, self._ops = config.num_channels, ops
        linear = partial(FusedLinear, bias=config.bias, dtype=dtype, ops=ops)
        self.first = linear([(f"{name}.in_proj", 3 * self._size)], hidden_size)
        self._output = linear(
            [(f"{name}.out_proj", hidden_size)], self._size, all_reduce=all_reduce
        )
        self._convolution = Convolution(
            f"{name}.conv", layer, config.shape, bias=config.bias, silu=False, ops=ops
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
        """[T, E] -> [T, C]; keeps the convolution's inputs."""
        before_TC, behind_TC, in_TC = self.first(x_TE).split([self._size] * 3, 1)  # type: ignore[no-untyped-call]
        seen_TC = self._convolution(self._ops.gate(in_TC, before_TC, None), context)
        return self._ops.gate(seen_TC, behind_TC, None)

    def finish(self, gated_TC: torch.Tensor, _context: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, E]."""
        return self._output(gated_TC)
