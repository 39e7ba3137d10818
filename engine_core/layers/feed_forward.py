"""Gated feed-forward: `down(activation(gate(x)) * up(x))`."""

from __future__ import annotations

from typing import Literal, assert_never

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Placements, merge
from kernels.interface.operations import Operations

Activation = Literal["silu", "gelu_tanh"]


class GatedFeedForward:
    """Gate and up are one product.

    Args:
        name: checkpoint prefix, such as "model.layers.0.mlp".
    """

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._gate_up = FusedLinear(
            [(f"{name}.gate_proj", intermediate_size), (f"{name}.up_proj", intermediate_size)],
            hidden_size,
            bias=bias,
            dtype=dtype,
            ops=ops,
        )
        self._down = FusedLinear(
            [(f"{name}.down_proj", hidden_size)],
            intermediate_size,
            bias=bias,
            dtype=dtype,
            ops=ops,
        )
        match activation:
            case "silu":
                self._activate = ops.silu_and_mul
            case "gelu_tanh":
                self._activate = ops.gelu_tanh_and_mul
            case _:
                assert_never(activation)

    def placements(self) -> Placements:
        """Of the three projections."""
        return merge([self._gate_up.placements(), self._down.placements()])

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self._down(self._activate(self._gate_up(x_TE)))
