"""Weights of dense layers on a GPU, and the product with each kind of them.

Owns the choice of the product by the kind of weight, and rows of a weight that is an embedding.
Must not contain arithmetic, nor know where weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels.interface.weights import LinearWeight
from kernels.triton.dense_linear import dense_linear
from kernels.triton.quantised_linear import quantised_linear
from kernels.triton.quantised_weights import QuantisedWeight, dequantise


@dataclass(frozen=True, slots=True)
class TritonLinearWeight:
    """[N, E] as it was loaded, and its bias."""

    weight_NE: torch.Tensor
    bias_N: torch.Tensor | None

    @property
    def num_inputs(self) -> int:
        return self.weight_NE.shape[1]

    @property
    def num_outputs(self) -> int:
        return self.weight_NE.shape[0]


@dataclass(frozen=True, slots=True)
class TritonQuantisedWeight:
    """A weight of 8 or 4 bits with its bias, for a model that computes in `dtype`."""

    weight: QuantisedWeight
    bias_N: torch.Tensor | None
    dtype: torch.dtype

    @property
    def num_inputs(self) -> int:
        return self.weight.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.weight.num_outputs


@dataclass(frozen=True, slots=True)
class TritonWeightParts:
    """Weights of the same inputs, whose outputs stand side by side."""

    parts: tuple[TritonLinearWeight | TritonQuantisedWeight, ...]

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)


def linear(x_TE: torch.Tensor, weight: LinearWeight, *, batch_invariant: bool) -> torch.Tensor:
    """`x @ weight.T + bias` -> [T, N], a new tensor.

    Args:
        batch_invariant: a row has the same bits whatever stands beside it.
    """
    match weight:
        case TritonLinearWeight():
            product = dense_linear if batch_invariant else F.linear
            return product(x_TE, weight.weight_NE, weight.bias_N)
        case TritonQuantisedWeight():
            return quantised_linear(
                x_TE, weight.weight, weight.bias_N, batch_invariant=batch_invariant
            )
        case TritonWeightParts():
            parts = [linear(x_TE, part, batch_invariant=batch_invariant) for part in weight.parts]
            return torch.cat(parts, dim=1)
    raise AssertionError(f"{type(weight).__name__} was prepared by another backend")


def gather_rows(token_ids_T: torch.Tensor, weight: torch.Tensor | LinearWeight) -> torch.Tensor:
    """Rows of an embedding for int64 ids in [0, V) -> [T, E], as `linear` multiplies with them.

    Few rows are widened by torch: its temporaries are float32 [T, E].
    """
    match weight:
        case torch.Tensor():
            return F.embedding(token_ids_T, weight)
        case TritonLinearWeight():
            return F.embedding(token_ids_T, weight.weight_NE)
        case TritonQuantisedWeight():
            table = weight.weight
            offsets_NG = table.offsets_NG
            rows = replace(
                table,
                num_outputs=token_ids_T.shape[0],
                packed_NJ=table.packed_NJ.index_select(0, token_ids_T),
                scales_NG=table.scales_NG.index_select(0, token_ids_T),
                offsets_NG=None if offsets_NG is None else offsets_NG.index_select(0, token_ids_T),
            )
            return dequantise(rows).to(weight.dtype)
    raise AssertionError(f"{type(weight).__name__} is no embedding, or another backend's")
