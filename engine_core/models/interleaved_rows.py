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


def interleaved_in(
    prefix: str, interleaved: Sequence[InterleavedRows], num_rows: int
) -> list[tuple[str, torch.Tensor]] | None:
    """Prefix of each product whose rows a tensor holds, and where they are, int64: of all groups
    the first piece, then the next one. None: it holds one product, or has another number of rows.
    `prefix`: of the tensor in the checkpoint, without its kind."""
    import torch

    found = next((each for each in interleaved if prefix.endswith(f".{each.name}")), None)
    if found is None or num_rows != found.num_rows:
        return None
    sizes = [size for _, pieces in found.parts for size in pieces]
    split = list(torch.split(torch.arange(num_rows).view(found.num_groups, -1), sizes, 1))
    for piece in found.pairs:
        split[piece] = split[piece].reshape(found.num_groups, -1, 2).transpose(1, 2)
    pieces = iter(split)
    layer = prefix.removesuffix(found.name)
    return [
        (f"{layer}{name}", torch.cat([next(pieces).flatten() for _ in own]))
        for name, own in found.parts
    ]


def taken_apart(
    tensors: Iterable[tuple[str, WeightPart]], interleaved: Sequence[InterleavedRows]
) -> Iterator[tuple[str, WeightPart]]:
    """Tensors of a checkpoint, with such weights and biases replaced by those of the products."""
    from kernels.interface.weights import QuantisedTensor

    for name, tensor in tensors:
        prefix, _, kind = name.rpartition(".")
        rows_by_product = interleaved_in(
            prefix, interleaved, tensor.shape[0] if tensor.shape else 0
        )
        if rows_by_product is None:
            yield name, tensor
            continue
        if isinstance(tensor, QuantisedTensor) and tensor.arrays.keys() != {"blocks"}:
            tensor = tensor.dequantise()  # rows of the arrays are not the matrix's
        for product, rows_N in rows_by_product:
            own = tensor.rows(rows_N) if isinstance(tensor, QuantisedTensor) else tensor[rows_N]
            yield f"{product}.{kind}", own
