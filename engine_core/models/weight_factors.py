"""Factors around a model's products, multiplied into their weights as these are read, so that a
step does not multiply (the multipliers of muP)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine_core.layers.config import WeightFactors

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import WeightPart


def factors_of(
    prefix: str, factors: Sequence[WeightFactors], *, with_inputs: bool
) -> torch.Tensor | float | None:
    """What each output of a product is multiplied by: one number, or float32 [outputs]. None: it
    has no factors. `prefix`: of its tensors in a checkpoint, without their kind. `with_inputs`:
    whether the factor of its inputs is part of it."""
    import torch

    found = next((each for each in factors if prefix.endswith(f".{each.name}")), None)
    if found is None:
        return None
    on_inputs = found.inputs if with_inputs else 1.0
    if isinstance(found.outputs, float):
        return on_inputs * found.outputs
    sizes, values = zip(*found.outputs, strict=True)
    return on_inputs * torch.tensor(values).repeat_interleave(torch.tensor(sizes))


def multiplied(
    tensors: Iterable[tuple[str, WeightPart]], factors: Sequence[WeightFactors]
) -> Iterator[tuple[str, WeightPart]]:
    """Tensors of a checkpoint, weights and biases of such products with their factors in them, in
    float32. Quantised ones are dequantised."""
    from kernels.interface.weights import QuantisedTensor

    for name, tensor in tensors:
        prefix, _, kind = name.rpartition(".")
        factor = factors_of(prefix, factors, with_inputs=kind == "weight")
        if factor is None:
            yield name, tensor
            continue
        rows = tensor.dequantise() if isinstance(tensor, QuantisedTensor) else tensor.float()
        if not isinstance(factor, float):
            if len(factor) != len(rows):
                yield name, tensor  # of another shape than the config says, which is told there
                continue
            factor = factor.view(-1, *[1] * (rows.dim() - 1))
        yield name, rows * factor
