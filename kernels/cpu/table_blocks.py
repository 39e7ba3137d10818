"""GGUF blocks whose weights have few values (IQ1, IQ2, IQ3, TQ), as places in a table of 16.

Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.interface.weights import QuantisedTensor

_ELEMENTS_AT_ONCE = 1 << 21


@dataclass(frozen=True, slots=True)
class TableType:
    """weight = d * factor * (2 * scale + 1) * one of `values`.

    Attributes:
        block_bytes: of 256 weights.
        d_at: where a block has d, float16.
        factor: a power of two.
        values: rising, 16 at most.
        scales: blocks, uint8 [B, block_bytes] -> integers [B, 8] or [B, 16], of equal shares.
    """

    block_bytes: int
    d_at: int
    factor: float
    values: tuple[int, ...]
    scales: Callable[[torch.Tensor], torch.Tensor]


def _signed(*values: int) -> tuple[int, ...]:
    return tuple(sorted((*values, *(-value for value in values))))


def _nibbles(bytes_: torch.Tensor) -> torch.Tensor:
    return torch.stack((bytes_ & 15, bytes_ >> 4), dim=2).flatten(1)


def _words(blocks_BK: torch.Tensor) -> torch.Tensor:
    """The four words of IQ1_M, int32 [B, 4]: three bits of four scales each, and four of d."""
    bytes_ = blocks_BK[:, 48:56].int()
    return bytes_[:, ::2] | bytes_[:, 1::2] << 8


def _of_iq1_m(blocks_BK: torch.Tensor) -> torch.Tensor:
    return (_words(blocks_BK)[..., None] >> torch.tensor((0, 3, 6, 9)) & 7).flatten(1)


def _of_ternary(blocks_BK: torch.Tensor) -> torch.Tensor:
    return blocks_BK.new_zeros(len(blocks_BK), 8)


_IQ1, _IQ2, _TERNARY = _signed(1, 7, 9), _signed(8, 25, 43), (-1, 0, 1, 2)

TABLE_TYPES = {
    "IQ1_S": TableType(50, 0, 1 / 8, _IQ1, lambda blocks: blocks[:, 35:50:2] >> 4 & 7),
    "IQ1_M": TableType(56, -1, 1 / 8, _IQ1, _of_iq1_m),
    "IQ2_XXS": TableType(66, 0, 1 / 8, _IQ2, lambda blocks: blocks[:, 9:66:8] >> 4),
    "IQ2_XS": TableType(74, 0, 1 / 8, _IQ2, lambda blocks: _nibbles(blocks[:, 66:])),
    "IQ2_S": TableType(82, 0, 1 / 8, _IQ2, lambda blocks: _nibbles(blocks[:, 74:])),
    "IQ3_XXS": TableType(
        98, 0, 1 / 4, _signed(4, 12, 20, 28, 36, 44, 52, 62), lambda blocks: blocks[:, 69::4] >> 4
    ),
    "IQ3_S": TableType(
        110, 0, 1.0, _signed(*range(1, 16, 2)), lambda blocks: _nibbles(blocks[:, 106:])
    ),
    "TQ1_0": TableType(54, 52, 1.0, _TERNARY, _of_ternary),
    "TQ2_0": TableType(66, 64, 1.0, _TERNARY, _of_ternary),
}
"""Types whose values are a table's, by their names in GGUF files."""


def _d_of(blocks_BK: torch.Tensor, type_: TableType) -> torch.Tensor:
    """float16 [B, 1]."""
    if type_.d_at >= 0:
        d_at = blocks_BK[:, type_.d_at : type_.d_at + 2].contiguous()
        return d_at.view(torch.float16)
    words = _words(blocks_BK) >> 12 << torch.tensor((0, 4, 8, 12))
    return words.sum(1, keepdim=True).to(torch.uint16).view(torch.float16)


def table_rows(part: QuantisedTensor) -> Iterator[torch.Tensor]:
    """Rows in the matrix's order, some at a time: uint8 [n, blocks * 168]. A block:

        d float16 | 16 scales s8 | nibbles [8, 16] | 16 codes, value + 128 | factor float32 | zeros

    Nibbles of a group of 32 inputs are the places of 0..15 in their low halves."""
    type_ = TABLE_TYPES[part.type_name]
    table = torch.tensor(type_.values, dtype=torch.float32)
    line = torch.zeros(22, dtype=torch.uint8)
    line[: len(table)] = (table + 128).to(torch.uint8)
    line[16:20] = torch.tensor([type_.factor]).view(torch.uint8)
    num_rows, num_inputs = part.shape
    step = max(1, _ELEMENTS_AT_ONCE // num_inputs)
    for start in range(0, num_rows, step):
        some = part.rows(torch.arange(start, min(start + step, num_rows)))
        blocks_BK = some.ordered()["blocks"].reshape(-1, type_.block_bytes)
        d = _d_of(blocks_BK, type_)
        scales = type_.scales(blocks_BK).to(torch.int8) * 2 + 1
        scales = scales.repeat_interleave(16 // scales.shape[1], dim=1)
        units = d.float() * type_.factor * scales
        values = some.dequantise().view(-1, 16, 16) / units[..., None]
        # 0 / 0 has no place: any will do
        places = torch.searchsorted(table, values - 0.25).clamp(max=len(table) - 1)
        groups = places.to(torch.uint8).view(-1, 8, 2, 16)
        nibbles = (groups[:, :, 0] | groups[:, :, 1] << 4).flatten(1)
        made = (d.view(torch.uint8), scales.view(torch.uint8), nibbles, line.expand(len(d), -1))
        yield torch.cat(made, dim=1).view(some.shape[0], -1)
