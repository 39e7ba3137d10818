"""What tensors of a family's checkpoints are called in its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine_core.layers.config import InterleavedRows
from engine_core.models.families.family import Family
from engine_core.models.interleaved_rows import taken_apart

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPart


def as_published(
    tensors: Iterable[tuple[str, WeightPart]], family: Family
) -> Iterable[tuple[str, WeightPart]]:
    """A checkpoint's tensors, with those of several experts taken apart."""
    if family.experts is None:
        return tensors
    publish = family.experts.published
    return (pair for name, tensor in tensors for pair in publish(name, tensor))


def renamed(file_name: str, family: Family) -> str:
    """The name in the model of a checkpoint's tensor."""
    for prefix, replacement in family.tensor_prefixes:
        if file_name.startswith(prefix):
            file_name = replacement + file_name.removeprefix(prefix)
            break
    for suffix, replacement in family.tensor_suffixes:
        if file_name.endswith(suffix):
            return file_name.removesuffix(suffix) + replacement
    return file_name


def as_products(
    family: Family, interleaved: Sequence[InterleavedRows], name: str, tensor: WeightPart
) -> Iterator[tuple[str, WeightPart]]:
    """Rows of a checkpoint's tensor, by the names that they have in the model."""
    published = as_published([(name, tensor)], family)
    for file_name, rows in taken_apart(published, interleaved):
        yield renamed(file_name, family), rows
