"""Lightning attention, a recurrent layer in the place of attention (arXiv:2401.04658)."""

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Parameter, Placements, merge
from kernels.interface.operations import Activations, ForwardContext, Operations
from kernels.interface.recurrence import (
    GatedNormParams,
    RecurrenceParams,
    RecurrenceShape,
    RecurrentCache,
)

_NORM_EPS = 1e-6


def lightning_shape(num_heads: int, head_size: int) -> RecurrenceShape:
    """The layer keeps a state a head, and no convolution's inputs."""
    return RecurrenceShape(
        num_key_heads=num_heads,
        num_heads=num_heads,
        key_size=head_size,
        value_size=head_size,
        num_channels=0,
        width=0,
        dtype=torch.float32,
    )


def slopes(num_heads: int, depth: float) -> torch.Tensor:
    """The rates of the decays, [H], of rising halves as in ALiBi (arXiv:2108.12409), and smaller
    the deeper a layer lies. `depth`: of it, from 0 to 1."""
    powers_H = torch.arange(1, num_heads + 1) * (-8 / num_heads)
    return torch.exp2(powers_H) * (1 - depth + 1e-5)


class LightningAttention:
    """`q, k, v = silu(qkv(h));  S_t = exp(-rate) S_{t-1} + v k^T`

    `o_proj(norm(S_t q) * sigmoid(output_gate(h)))`, the norm over all heads.

    Args:
        name: checkpoint prefix.
        layer: index into the context's states and metadata.
        rate_H: float32, of each head.
    """

    first = None  # two products read the inputs

    def __init__(
        self,
        name: str,
        layer: int,
        shape: RecurrenceShape,
        hidden_size: int,
        rate_H: torch.Tensor,
        *,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._layer, self._ops = layer, ops
        size = shape.num_heads * shape.value_size
        self._qkv, self._gate, self._output = (
            FusedLinear(
                [(f"{name}.{part}", outputs) for part in parts],
                inputs,
                bias=False,
                dtype=dtype,
                ops=ops,
            )
            for parts, outputs, inputs in (
                (("q_proj", "k_proj", "v_proj"), size, hidden_size),
                (("output_gate",), size, hidden_size),
                (("o_proj",), hidden_size, size),
            )
        )
        self._params = RecurrenceParams(
            shape=shape,
            starts=(0, size, 2 * size),
            rate_H=rate_H.to(ops.device),
            bias_HD=None,
            rule="plain",
        )
        self._norm = Parameter(f"{name}.norm.weight", (size,), torch.float32, device=ops.device)
        self._norm_params = GatedNormParams(
            weight_N=self._norm.tensor, size=size, eps=_NORM_EPS, activation="sigmoid"
        )

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self._qkv, self._gate, self._output]

    def placements(self) -> Placements:
        return merge([self._norm.placements(), *(each.placements() for each in self.linears)])

    def begin(
        self, x_TE: Activations, _positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, H * P]; keeps states."""
        qkv_TC = self._ops.activate(self._qkv(x_TE), "silu")
        cache, metadata = (
            RecurrentCache(*context.states[self._layer]),
            context.metadata[self._layer],
        )
        out_TN = self._ops.recur(qkv_TC, None, None, self._params, cache, metadata)
        return self._ops.gated_norm(out_TN, self._gate(x_TE), self._norm_params)

    def finish(self, normed_TN: torch.Tensor, _context: ForwardContext) -> torch.Tensor:
        """[T, H * P] -> [T, E]."""
        return self._output(normed_TN)
