"""Mamba-2, a recurrent layer in the place of attention (arXiv:2405.21060)."""

from functools import partial

import torch

from engine_core.distributed.parallel import Parallel
from engine_core.layers.config import Mamba2Config
from engine_core.layers.convolution import Convolution
from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import CopyWeight, Parameter, Placement, Placements, merge
from kernels.interface.operations import Activations, AllReduce, ForwardContext, Operations
from kernels.interface.recurrence import (
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)


class Mamba2:
    """`z, xBC, dt = in_proj(h);  x, B, C = silu(convolution(xBC));  dt = softplus(dt + dt_bias)`

    `S_t = exp(-exp(A_log) dt) S_{t-1} + dt x B^T;  y = S_t C + D x`

    `out_proj(norm(y * silu(z)))`, the norm over each group of heads, or `norm(y) * silu(z)`, or
    without a norm.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
        all_reduce: see `FusedLinear`, of the output. None: all heads are here.
        place: of this rank among those that share the layer.
    """

    def __init__(
        self,
        name: str,
        layer: int,
        config: Mamba2Config,
        hidden_size: int,
        *,
        norm_eps: float,
        dtype: torch.dtype,
        ops: Operations,
        all_reduce: AllReduce | None = None,
        place: Parallel | None = None,
    ) -> None:
        self._name, self._layer, self._ops = name, layer, ops
        num_heads, inner, channels = config.num_heads, config.inner_size, config.num_channels
        self._columns = [inner, channels, num_heads]
        linear = partial(FusedLinear, dtype=dtype, ops=ops)
        self.first = linear(
            [(f"{name}.in_proj", sum(self._columns))], hidden_size, bias=config.bias
        )
        self._output = linear(
            [(f"{name}.out_proj", hidden_size)],
            inner,
            bias=config.output_bias,
            all_reduce=all_reduce,
        )
        self._all_reduce, self._place = all_reduce, place or Parallel()
        self._ranks_a_group = config.ranks_a_group
        shape = config.shape
        self._convolution = Convolution(
            f"{name}.conv1d", layer, shape, bias=config.convolution_bias, silu=True, ops=ops
        )
        self._rate_H = torch.zeros(num_heads, device=ops.device)
        self._step_bias, self._skip, self._norm = (
            Parameter(f"{name}.{part}", (size,), torch.float32, device=ops.device)
            for part, size in (("dt_bias", num_heads), ("D", num_heads), ("norm.weight", inner))
        )
        keys = config.num_groups * config.state_size
        self._params = RecurrenceParams(
            shape=shape,
            starts=(inner + keys, inner, 0),
            rate_H=self._rate_H,
            bias_HD=self._step_bias.tensor[:, None],
            rule="discretised",
            skip_H=self._skip.tensor,
        )
        self._norm_params = GatedNormParams(
            weight_N=self._norm.tensor,
            size=inner // config.num_groups,
            eps=norm_eps,
            activation="silu",
            gate_first=config.gate_first,
        )
        self._is_normed = config.normed

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self.first, self._output]

    def placements(self) -> Placements:
        kept = [self._step_bias, self._skip] + [self._norm] * self._is_normed
        own = (part.placements() for part in kept)
        parts = (self.first.placements(), self._output.placements())
        rate: Placements = {
            f"{self._name}.A_log": Placement(tuple(self._rate_H.shape), self._store_rate)
        }
        return merge([rate, *own, *parts, self._convolution.placements()])

    def _store_rate(self, log_rate_H: torch.Tensor, copy: CopyWeight) -> None:
        copy(self._rate_H, log_rate_H.float().exp())

    def begin(
        self, x_TE: Activations, _positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, inner]; keeps states and the convolution's inputs."""
        gate_TN, x_TC, step_TH = self.first(x_TE).split(self._columns, 1)  # type: ignore[no-untyped-call]
        x_TC = self._convolution(x_TC, context)
        cache, metadata = (
            RecurrentCache(*context.states[self._layer]),
            context.metadata[self._layer],
        )
        out_TN = self._ops.recur(x_TC, step_TH, None, self._params, cache, metadata)
        if not self._is_normed:
            return self._ops.silu_and_mul(torch.cat([gate_TN, out_TN], 1))
        if self._ranks_a_group == 1:
            return self._ops.gated_norm(out_TN, gate_TN, self._norm_params)
        if self._norm_params.gate_first:
            return self._ops.reduce(self._gated(out_TN, gate_TN), self._norm_over_ranks)
        return self._gated(self._ops.reduce(out_TN, self._norm_over_ranks), gate_TN)

    def _gated(self, x_TN: torch.Tensor, gate_TN: torch.Tensor) -> torch.Tensor:
        """`x * silu(gate)`."""
        return self._ops.gate(self._ops.gate(x_TN, gate_TN, None), gate_TN, "sigmoid")

    def _norm_over_ranks(self, x_TN: torch.Tensor) -> torch.Tensor:
        """In place, the norm of columns that are a part of a group -> its argument."""
        assert self._all_reduce is not None, "ranks share a group"
        group, norm = self._place.tp_rank // self._ranks_a_group, self._norm_params
        num_groups = self._place.tp_size // self._ranks_a_group
        sums_TG = torch.zeros(len(x_TN), num_groups, device=x_TN.device)
        sums_TG[:, group] = x_TN.float().square().sum(1)
        mean_T1 = self._all_reduce(sums_TG)[:, group, None] / (norm.size * self._ranks_a_group)
        return x_TN.copy_(x_TN.float() * torch.rsqrt(mean_T1 + norm.eps) * norm.weight_N)

    def finish(self, normed_TN: torch.Tensor, _context: ForwardContext) -> torch.Tensor:
        """[T, inner] -> [T, E]."""
        return self._output(normed_TN)
