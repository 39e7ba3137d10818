"""Feed-forward layers: one gated block for every token, or a few of many such experts.

dense    down(activation(gate(x)) * up(x))
sparse   sum over the top_k experts x of weight[x] * down[x](silu(gate[x](h)) * up[x](h))
"""

from __future__ import annotations

from functools import partial
from typing import Literal, assert_never

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import CopyWeight, Placement, Placements, merge
from kernels.interface.operations import ExpertRouting, Operations
from kernels.interface.weights import ExpertWeights

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


class SparseFeedForward:
    """Router and experts; gate and up are one product, and all experts one call.

    Args:
        name: checkpoint prefix of router and experts, such as "model.layers.0.mlp".
        projections: names of an expert's gate, up and down.
        intermediate_size: of one expert.
        renormalise: the weights of a token's experts are made to sum to one.
        round_weights: they are rounded to `dtype` before they are used.
    """

    def __init__(
        self,
        name: str,
        projections: tuple[str, str, str],
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        top_k: int,
        renormalise: bool,
        round_weights: bool,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._name = name
        self._projections = projections
        self._gate_up_shape = (num_experts, 2 * intermediate_size, hidden_size)
        self._down_shape = (num_experts, hidden_size, intermediate_size)
        self._routing = ExpertRouting(
            top_k=top_k,
            renormalise=renormalise,
            weights_dtype=dtype if round_weights else torch.float32,
        )
        self._dtype = dtype
        self._ops = ops
        self._router = FusedLinear(
            [(f"{name}.gate", num_experts)],
            hidden_size,
            bias=False,
            dtype=dtype,
            ops=ops,
            least_bits=32,  # a router that errs sends tokens through other experts
        )
        self._num_missing = 3 * num_experts
        self._fused: tuple[torch.Tensor, torch.Tensor] | None = None
        self._experts: ExpertWeights | None = None

    def placements(self) -> Placements:
        """Of the router, and of gate, up and down of every expert."""
        num_experts, hidden_size, features = self._down_shape
        gate, up, down = self._projections
        placements = self._router.placements()
        for expert in range(num_experts):
            for name, shape, part, rows in (
                (gate, (features, hidden_size), 0, slice(None, features)),
                (up, (features, hidden_size), 0, slice(features, None)),
                (down, (hidden_size, features), 1, slice(None)),
            ):
                placements[f"{self._name}.experts.{expert}.{name}.weight"] = Placement(
                    shape, partial(self._store, part, expert, rows)
                )
        return placements

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        assert self._experts is not None, f"experts of {self._name} were not loaded"
        return self._ops.mixture_of_experts(x_TE, self._router(x_TE), self._experts, self._routing)

    def _store(
        self, part: int, expert: int, rows: slice, tensor: torch.Tensor, copy: CopyWeight
    ) -> None:
        if self._fused is None:  # allocated on first use: only the layers being read exist
            self._fused = (self._new(self._gate_up_shape), self._new(self._down_shape))
        copy(self._fused[part][expert, rows], tensor)
        self._num_missing -= 1
        if not self._num_missing:
            self._experts = self._ops.prepare_experts(*self._fused)
            self._fused = None

    def _new(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._ops.device)
