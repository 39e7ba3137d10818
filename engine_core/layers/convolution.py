"""A convolution of each channel over a token and those before it, whose inputs a layer keeps."""

from collections.abc import Sequence
from functools import partial

import torch

from engine_core.layers.parameters import CopyWeight, Parameter, Placement, Placements
from kernels.interface.operations import ForwardContext, Operations
from kernels.interface.recurrence import ConvolutionParams, RecurrenceShape, RecurrentCache


class Convolution:
    """`y[t] = sum over w of weight[w] * x[t - W + 1 + w] + bias`, then silu if there is one.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
        parts: of several whose equal parts of the channels are tensors of their own, `q_conv1d`
            within `name` and so on; (): `name` is the only one.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        shape: RecurrenceShape,
        *,
        bias: bool,
        silu: bool,
        ops: Operations,
        parts: Sequence[str] = (),
    ) -> None:
        self._layer, self._ops = layer, ops
        self._parts = [f"{name}.{part}_conv1d" for part in parts] or [name]
        size = (shape.num_channels,)
        self._bias = (
            Parameter(f"{name}.bias", size, torch.float32, device=ops.device) if bias else None
        )
        self._params = ConvolutionParams(
            shape=shape,
            weight_WC=torch.zeros(shape.width, *size, device=ops.device),
            bias_C=None if self._bias is None else self._bias.tensor,
            silu=silu,
        )

    def placements(self) -> Placements:
        width, num_channels = self._params.weight_WC.shape
        size = num_channels // len(self._parts)
        placements: Placements = {
            f"{part}.weight": Placement((size, 1, width), partial(self._store, number * size))
            for number, part in enumerate(self._parts)
        }
        return placements if self._bias is None else placements | self._bias.placements()

    def _store(self, start: int, weight_C1W: torch.Tensor, copy: CopyWeight) -> None:
        own_WC = self._params.weight_WC[:, start : start + len(weight_C1W)]
        copy(own_WC, weight_C1W[:, 0].T)

    def __call__(self, x_TC: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, C] -> [T, C]; keeps the inputs."""
        cache = RecurrentCache(*context.states[self._layer])
        return self._ops.convolve(x_TC, self._params, cache, context.metadata[self._layer])
