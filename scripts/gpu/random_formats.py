"""Models of random quantised weights: one of 16 bits is rounded when its layer has it whole."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.interface.operations import LinearWeight
from kernels.triton.fp8_rounding import reference_quantise_rows
from kernels.triton.linear.fp8 import prepare_float8
from kernels.triton.linear.layers import TritonQuantisedWeight
from kernels.triton.linear.quantised_weights import quantise
from kernels.triton.operations import TritonOperations

MOST_OUTPUTS = 100_000
"""A product of more is the head, which files leave in 16 bits."""
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {
    "FP8": (lambda weight_NE: prepare_float8(*reference_quantise_rows(weight_NE)), 1.0),
    "INT4": (partial(quantise, num_bits=4, group_size=128), 0.5 + 2 / 128),
}
"""What rounds a random weight, and the bytes of an element with its share of a scale."""


class RoundingOperations(TritonOperations):
    """Rounds each weight of 16 bits to one of `FORMATS` when a layer has it whole."""

    name_of_format = ""

    def prepare_linear(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> LinearWeight:
        if len(weight_NE) > MOST_OUTPUTS:
            return super().prepare_linear(weight_NE, bias_N)
        rounded, _ = FORMATS[self.name_of_format]
        return TritonQuantisedWeight(rounded(weight_NE), bias_N, weight_NE.dtype)
