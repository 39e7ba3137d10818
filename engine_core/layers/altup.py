"""Gemma 3n's residual streams, and what else its layers have beside attention and feed-forward.

AltUp (arXiv:2301.13310)   N streams, of which a layer computes one; a token's own small matrices
                           predict all of them before it and correct them behind it
LAuReL (arXiv:2411.07501)  x + norm(right(left(x))), of low rank, beside attention
sparse activation          of gates those far above their mean are kept

Shape suffixes: N streams, E the hidden size."""

from collections.abc import Sequence
from functools import partial

import torch

from engine_core.layers.config import Activation, AltUpConfig
from engine_core.layers.feed_forward import DenseFeedForward
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from kernels.interface.operations import Activations, ForwardContext, Operations, RoundedRows

_LEAST_SQUARE = 1e-5


class Streams:
    """Makes N streams of the embeddings, and one hidden state of N streams. Each begins, and ends,
    with the magnitude of the first one. `name`: of a list of N - 1 matrices."""

    def __init__(
        self,
        name: str,
        config: AltUpConfig,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        linear = partial(FusedLinear, bias=False, dtype=dtype, ops=ops)
        numbers = range(config.num_streams - 1)
        self.linears = [linear([(f"{name}.{n}", hidden_size)], hidden_size) for n in numbers]

    def placements(self) -> Placements:
        return merge([each.placements() for each in self.linears])

    def widen(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, N, E]."""
        size_T1 = _mean_square(x_TE).sqrt()
        return torch.stack([x_TE, *(_of_size(each(x_TE), size_T1) for each in self.linears)], 1)

    def narrow(self, streams_TNE: torch.Tensor) -> torch.Tensor:
        """[T, N, E] -> their mean, [T, E]."""
        first_TE, *others = streams_TNE.unbind(1)
        size_T1 = _mean_square(first_TE).sqrt()
        sum_TE = first_TE.clone()
        for each, x_TE in zip(self.linears, others, strict=True):
            sum_TE += _of_size(each(x_TE.contiguous()), size_T1)
        return sum_TE / streams_TNE.shape[1]


def _mean_square(x_TE: torch.Tensor) -> torch.Tensor:
    return x_TE.square().mean(-1, keepdim=True)


def _of_size(x_TE: torch.Tensor, size_T1: torch.Tensor) -> torch.Tensor:
    return x_TE * size_T1 / _mean_square(x_TE).clamp(min=_LEAST_SQUARE).sqrt()


class AltUp:
    """Predicts and corrects the streams of one layer. `name`: checkpoint prefix. `norm`: of what
    the coefficients are made of."""

    def __init__(
        self,
        name: str,
        config: AltUpConfig,
        hidden_size: int,
        *,
        norm: RMSNorm,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        number = self.num_streams = config.num_streams
        linear = partial(FusedLinear, bias=False, dtype=dtype, ops=ops, least_bits=32)
        self._router = linear([(f"{name}.modality_router", number)], hidden_size)
        self._prediction = linear([(f"{name}.prediction_coefs", number**2)], number)
        self._correction = linear([(f"{name}.correction_coefs", number)], number)
        self.linears = [self._router, self._prediction, self._correction]
        self._scale = Parameter(
            f"{name}.correct_output_scale", (hidden_size,), dtype, device=ops.device
        )
        self._norm, self._active = norm, config.active
        self._scales_corrected = config.scales_corrected

    def placements(self) -> Placements:
        parts: Sequence[FusedLinear | Parameter | RMSNorm] = (
            *self.linears,
            self._scale,
            self._norm,
        )
        return merge([part.placements() for part in parts])

    def _modalities(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> what coefficients are made of, [T, N]."""
        routed_TN = self._router(self._norm(x_TE.contiguous()) / x_TE.shape[1])
        return torch.tanh(routed_TN.float()).to(x_TE.dtype)

    def predict(self, streams_TNE: torch.Tensor) -> torch.Tensor:
        """[T, N, E] -> as much."""
        coefficients = self._prediction(self._modalities(streams_TNE[:, self._active]))
        by_TNN = coefficients.view(-1, self.num_streams, self.num_streams)
        out_TNE = streams_TNE.clone()
        for source in range(self.num_streams):  # in one order, whatever the number of tokens
            out_TNE += by_TNN[:, :, source, None] * streams_TNE[:, source, None]
        return out_TNE

    def correct(self, streams_TNE: torch.Tensor, computed_TE: torch.Tensor) -> torch.Tensor:
        """Predictions, and what the layer made of the computed stream -> [T, N, E]."""
        by_TN = self._correction(self._modalities(computed_TE)) + 1.0
        new_TE = computed_TE - streams_TNE[:, self._active]
        return streams_TNE + new_TE[:, None] * by_TN[:, :, None]

    def computed(self, streams_TNE: torch.Tensor) -> torch.Tensor:
        """The stream that layers compute."""
        return streams_TNE[:, self._active].contiguous()

    def scaled(self, x_TE: torch.Tensor) -> torch.Tensor:
        """The computed stream, corrected, as the layer's inputs are added to it."""
        return x_TE * self._scale.tensor if self._scales_corrected else x_TE


class Laurel:
    """`x + norm(right(left(x)))`. `name`: checkpoint prefix."""

    def __init__(
        self,
        name: str,
        rank: int,
        hidden_size: int,
        *,
        norm: RMSNorm,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        linear = partial(FusedLinear, bias=False, dtype=dtype, ops=ops)
        self._left = linear([(f"{name}.linear_left", rank)], hidden_size)
        self._right = linear([(f"{name}.linear_right", hidden_size)], rank)
        self.linears = [self._left, self._right]
        self._norm = norm

    def placements(self) -> Placements:
        return merge([self._norm.placements(), *(each.placements() for each in self.linears)])

    def __call__(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return x_TE + self._norm(self._right(self._left(x_TE)))


class SparselyActivated(DenseFeedForward):
    """A feed-forward whose gates lose their mean and so many standard deviations, and what is left
    below 0. Other arguments: see `DenseFeedForward`."""

    def __init__(
        self,
        name: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        deviations: float,
        activation: Activation,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        super().__init__(
            name,
            hidden_size,
            intermediate_size,
            activation=activation,
            bias=False,
            dtype=dtype,
            ops=ops,
        )
        self._deviations = deviations

    def __call__(self, x_TE: Activations, _context: ForwardContext) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        assert not isinstance(x_TE, RoundedRows), "rounded for another product"
        gate_up_TF2 = self.first(x_TE)
        gate_TF = gate_up_TF2.chunk(2, 1)[0]
        mean_T1 = gate_TF.mean(1, keepdim=True)
        deviation_T1 = _mean_square(gate_TF - mean_T1).sqrt()
        gate_TF.sub_(mean_T1 + deviation_T1 * self._deviations).relu_()
        return self._down(self._ops.gelu_tanh_and_mul(gate_up_TF2))
