"""Rows of a checkpoint's tensor that belong to several products, taken apart as it is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from engine_core.layers.config import InterleavedRows
from engine_core.models.interface import ModelSpec

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import WeightPart


def paired_heads(spec: ModelSpec, turning: int | None = None) -> tuple[InterleavedRows, ...]:
    """Queries and keys of checkpoints whose heads begin with rotary pairs side by side.
    `turning`: how much of a head turns; None: all."""
    keys = spec.keys_of(0)
    pieces = (turning or keys.key_size, keys.key_size - (turning or keys.key_size))
    return tuple(
        InterleavedRows(name, 1, ((name, pieces * heads),), tuple(range(0, 2 * heads, 2)))
        for name, heads in (
            ("self_attn.q_proj", spec.num_query_heads),
            ("self_attn.k_proj", keys.num_kv_heads),
        )
    )


def taken_apart(
    tensors: Iterable[tuple[str, WeightPart]], interleaved: Sequence[InterleavedRows]
) -> Iterator[tuple[str, WeightPart]]:
    """Tensors of a checkpoint, with such weights and biases replaced by those of the products. One
    with another number of rows holds one product."""
    from kernels.interface.weights import QuantisedTensor

    for name, tensor in tensors:
        prefix, _, kind = name.rpartition(".")
        num_rows = tensor.shape[0] if tensor.shape else 0
        found = next((each for each in interleaved if prefix.endswith(f".{each.name}")), None)
        if found is None or num_rows != found.num_rows:
            yield name, tensor
            continue
        if isinstance(tensor, QuantisedTensor) and not tensor.has_rows:
            tensor = tensor.dequantise()
        layer = prefix.removesuffix(found.name)
        for product, rows_N in _rows_by_product(found):
            own = tensor.rows(rows_N) if isinstance(tensor, QuantisedTensor) else tensor[rows_N]
            if product in found.transposed:
                floats_NE = own.dequantise() if isinstance(own, QuantisedTensor) else own
                groups = floats_NE.view(found.num_groups, -1, floats_NE.shape[1])
                own = groups.transpose(1, 2).flatten(0, 1)
            yield f"{layer}{product}.{kind}", own


def _rows_by_product(found: InterleavedRows) -> Iterator[tuple[str, torch.Tensor]]:
    """Where each product's rows are, int64: of all groups the first piece, then the next one."""
    import torch

    sizes = [size for _, pieces in found.parts for size in pieces]
    rows_GN = torch.arange(found.num_rows).view(found.num_groups, -1)
    split = list(torch.split(rows_GN, sizes, 1))
    for piece in found.pairs:
        split[piece] = split[piece].reshape(found.num_groups, -1, 2).transpose(1, 2)
    pieces = iter(split)
    for name, own in found.parts:
        yield name, torch.cat([next(pieces).flatten() for _ in own])
