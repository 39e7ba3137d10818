"""Kimi delta attention, a gated delta net with a decay of each channel of a key
(arXiv:2510.26692)."""

import dataclasses

import torch

from engine_core.layers.config import DeltaNetConfig
from engine_core.layers.convolution import Convolution
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import CopyWeight, Parameter, Placement, Placements, merge
from kernels.interface.operations import Activations, ForwardContext, Operations
from kernels.interface.recurrence import (
    GatedNormParams,
    RecurrenceParams,
    RecurrenceShape,
    RecurrentCache,
)


def kimi_delta_shape(config: DeltaNetConfig) -> RecurrenceShape:
    """The shape of a gated delta net's state, with a decay a channel."""
    return dataclasses.replace(config.shape, decay_size=config.key_size)


class KimiDeltaAttention:
    """`q, k, v = silu(convolution(qkv(h)));  q = q / |q| / sqrt(N);  k = k / |k|`

    `a = exp(-exp(A_log) softplus(f_b(f_a(h)) + dt_bias)), [H, N];  b = sigmoid(b_proj(h))`

    `S_t = S_{t-1} a + b (v - S_{t-1} a k) k^T;  o_proj(norm(S_t q) * sigmoid(g_b(g_a(h))))`

    The norm is of each head's values.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
    """

    first = None  # two products read the inputs

    def __init__(
        self,
        name: str,
        layer: int,
        config: DeltaNetConfig,
        hidden_size: int,
        *,
        norm_eps: float,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._name, self._layer, self._ops = name, layer, ops
        num_heads, size, inner = config.num_heads, config.value_size, config.inner_size
        self._qkv_g, self._b_f, self._g, self._f, self._output = (
            FusedLinear(
                [(f"{name}.{part}", outputs) for part, outputs in parts.items()],
                inputs,
                bias=False,
                dtype=dtype,
                ops=ops,
                least_bits=least_bits,
            )
            for parts, inputs, least_bits in (
                (
                    dict.fromkeys(("q_proj", "k_proj", "v_proj"), inner) | {"g_a_proj": size},
                    hidden_size,
                    4,
                ),
                # few rows, of which the decays of the whole state are made
                ({"b_proj": num_heads, "f_a_proj": size}, hidden_size, 32),
                ({"g_b_proj": inner}, size, 4),
                ({"f_b_proj": inner}, size, 32),
                ({"o_proj": hidden_size}, inner, 4),
            )
        )
        self._columns, self._few = [3 * inner, size], [num_heads, size]
        shape = kimi_delta_shape(config)
        self._convolution = Convolution(
            name, layer, shape, bias=False, silu=True, ops=ops, parts=("q", "k", "v")
        )
        self._rate_H = torch.zeros(num_heads, device=ops.device)
        self._bias, self._norm = (
            Parameter(f"{name}.{part}", (columns,), torch.float32, device=ops.device)
            for part, columns in (("dt_bias", inner), ("o_norm.weight", size))
        )
        self._params = RecurrenceParams(
            shape=shape,
            starts=(0, inner, 2 * inner),
            rate_H=self._rate_H,
            bias_HD=self._bias.tensor.view(num_heads, -1),
            rule="delta",
            normed=True,
            q_scale=size**-0.5,
        )
        self._norm_params = GatedNormParams(
            weight_N=self._norm.tensor, size=size, eps=norm_eps, activation="sigmoid"
        )

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self._qkv_g, self._b_f, self._g, self._f, self._output]

    def placements(self) -> Placements:
        rate: Placements = {
            f"{self._name}.A_log": Placement((1, 1, len(self._rate_H), 1), self._store_rate)
        }
        products = [each.placements() for each in self.linears]
        own = [self._bias.placements(), self._norm.placements(), self._convolution.placements()]
        return merge([rate, *products, *own])

    def _store_rate(self, log_rate_11H1: torch.Tensor, copy: CopyWeight) -> None:
        copy(self._rate_H, log_rate_11H1.flatten().float().exp())

    def begin(
        self, x_TE: Activations, _positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, H * P]; keeps states and the convolution's inputs."""
        qkv_TC, g_TN = self._qkv_g(x_TE).split(self._columns, 1)  # type: ignore[no-untyped-call]
        b_TH, f_TN = self._b_f(x_TE).split(self._few, 1)  # type: ignore[no-untyped-call]
        qkv_TC, gate_TN, a_TN = self._convolution(qkv_TC, context), self._g(g_TN), self._f(f_TN)
        cache, metadata = (
            RecurrentCache(*context.states[self._layer]),
            context.metadata[self._layer],
        )
        out_TN = self._ops.recur(qkv_TC, a_TN, b_TH, self._params, cache, metadata)
        return self._ops.gated_norm(out_TN, gate_TN, self._norm_params)

    def finish(self, normed_TN: torch.Tensor, _context: ForwardContext) -> torch.Tensor:
        """[T, H * P] -> [T, E]."""
        return self._output(normed_TN)
