"""The gated delta net, a recurrent layer in the place of attention (arXiv:2412.06464)."""

import torch

from engine_core.layers.config import DeltaNetConfig
from engine_core.layers.convolution import Convolution
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import CopyWeight, Parameter, Placement, Placements, merge
from kernels.interface.operations import Activations, AllReduce, ForwardContext, Operations
from kernels.interface.recurrence import (
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)


class GatedDeltaNet:
    """`q, k, v = silu(convolution(qkv(h)));  q = q / |q| / sqrt(N);  k = k / |k|`

    `a = exp(-exp(A_log) softplus(in_a(h) + dt_bias));  b = sigmoid(in_b(h))`

    `S_t = a S_{t-1} + b (v - a S_{t-1} k) k^T;  out_proj(norm(S_t q) * silu(in_z(h)))`

    The norm is of each head's values.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
        all_reduce: see `FusedLinear`, of the output.
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
        all_reduce: AllReduce | None = None,
    ) -> None:
        self._name, self._layer, self._ops = name, layer, ops
        self._columns = [config.num_channels, config.inner_size]
        self._heads = [config.num_heads, config.num_heads]
        self._qkv_z, self._b_a, self._output = (
            FusedLinear(
                [(f"{name}.{part}", size) for part, size in zip(parts, sizes, strict=True)],
                inputs,
                bias=False,
                dtype=dtype,
                ops=ops,
                least_bits=least_bits,
                all_reduce=reduced,
            )
            for parts, sizes, inputs, least_bits, reduced in (
                (("in_proj_qkv", "in_proj_z"), self._columns, hidden_size, 4, None),
                # few rows, of which the decay of the whole state is made
                (("in_proj_b", "in_proj_a"), self._heads, hidden_size, 32, None),
                (("out_proj",), [hidden_size], config.inner_size, 4, all_reduce),
            )
        )
        shared = config.num_heads // config.num_key_heads if config.is_output_tiled else 1
        if shared > 1:
            self._output.input_order_E = (
                torch.arange(config.inner_size)
                .view(-1, shared, config.value_size)
                .transpose(0, 1)
                .flatten()
            )
        shape = config.shape
        self._convolution = Convolution(
            f"{name}.conv1d", layer, shape, bias=False, silu=True, ops=ops
        )
        self._rate_H = torch.zeros(config.num_heads, device=ops.device)
        self._bias, self._norm = (
            Parameter(f"{name}.{part}", (size,), torch.float32, device=ops.device)
            for part, size in (("dt_bias", config.num_heads), ("norm.weight", config.value_size))
        )
        keys = config.num_key_heads * config.key_size
        self._params = RecurrenceParams(
            shape=shape,
            starts=(0, keys, 2 * keys),
            rate_H=self._rate_H,
            bias_HD=self._bias.tensor[:, None],
            rule="delta",
            normed=True,
            q_scale=config.key_size**-0.5,
        )
        self._norm_params = GatedNormParams(
            weight_N=self._norm.tensor,
            size=config.value_size,
            eps=norm_eps,
            activation="silu",
            transposed=shared,
        )

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self._qkv_z, self._b_a, self._output]

    def placements(self) -> Placements:
        rate: Placements = {
            f"{self._name}.A_log": Placement(tuple(self._rate_H.shape), self._store_rate)
        }
        products = [each.placements() for each in self.linears]
        own = [self._bias.placements(), self._norm.placements(), self._convolution.placements()]
        return merge([rate, *products, *own])

    def _store_rate(self, log_rate_H: torch.Tensor, copy: CopyWeight) -> None:
        copy(self._rate_H, log_rate_H.float().exp())

    def begin(
        self, x_TE: Activations, _positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, H * P]; keeps states and the convolution's inputs."""
        qkv_TC, z_TN = self._qkv_z(x_TE).split(self._columns, 1)  # type: ignore[no-untyped-call]
        b_TH, a_TH = self._b_a(x_TE).split(self._heads, 1)  # type: ignore[no-untyped-call]
        qkv_TC = self._convolution(qkv_TC, context)
        cache = RecurrentCache(*context.states[self._layer])
        out_TN = self._ops.recur(
            qkv_TC, a_TH, b_TH, self._params, cache, context.metadata[self._layer]
        )
        return self._ops.gated_norm(out_TN, z_TN, self._norm_params)

    def finish(self, normed_TN: torch.Tensor, _context: ForwardContext) -> torch.Tensor:
        """[T, H * P] -> [T, E]."""
        return self._output(normed_TN)
