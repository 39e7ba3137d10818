"""The weights of one model in the native library's layouts: see `kernels.interface.weights`.

Owns which layout each part of a weight gets, parts of unlike layouts side by side, and what comes
out of a file of packed weights. Must not know the layouts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from kernels.cpu.block_conversions import q5_0_as_q8_0
from kernels.cpu.gguf_blocks import GGUF_KINDS, pack_gguf
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import PackedParts
from kernels.cpu.packed_file import map_packed, save_packed
from kernels.cpu.weights import (
    Bytes,
    LinearKind,
    PackedLinear,
    pack_float,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.weights import LinearWeight, QuantisedTensor, WeightPart

FloatFormat = Literal["float32", "int8", "int4"]

_FLOAT32 = "float32"
_PACKERS = {_FLOAT32: pack_float, "int8": quantise_int8, "int4": quantise_int4}
_BITS: tuple[tuple[str, int], ...] = (("int4", 4), ("int8", 8), (_FLOAT32, 32))
_KINDS = GGUF_KINDS | {
    _FLOAT32: LinearKind.F32,
    "int8": LinearKind.I8_ROW,
    "int4": LinearKind.Q4_MINIMUM,
}
_CONVERSIONS: dict[str, tuple[str, Callable[[Bytes], Bytes]]] = {"Q5_0": ("Q8_0", q5_0_as_q8_0)}
"""Types that run as another which holds the same numbers."""

BLOCK_TYPES = frozenset(GGUF_KINDS) | frozenset(_CONVERSIONS)
"""The GGUF types that stay blocks."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring parts of one format, which become one weight."""

    format: str
    parts: tuple[WeightPart, ...]

    @property
    def num_outputs(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def num_inputs(self) -> int:
        return self.parts[0].shape[1]

    @property
    def kind(self) -> LinearKind:
        return _KINDS[self.format]

    def describes(self, weight: PackedLinear) -> bool:
        return (weight.kind, weight.num_outputs, weight.num_inputs) == (
            self.kind,
            self.num_outputs,
            self.num_inputs,
        )


class NativePacking:
    """
    Args:
        library: packs and gathers.
        floats: what floating parts become: "float32", "int8" (a scale a row) or "int4" (a scale and
            a minimum for 32 inputs).
        keeps_blocks: quantised parts of BLOCK_TYPES stay what they are; else they are dequantised
            and become what floating ones become.

    Raises:
        ValueError: another name for `floats`.
    """

    def __init__(
        self,
        library: NativeLibrary,
        floats: FloatFormat = "float32",
        *,
        keeps_blocks: bool = True,
    ) -> None:
        if floats not in _PACKERS:
            raise ValueError(
                f'floating weights cannot become "{floats}", only {", ".join(_PACKERS)}'
            )
        self._library = library
        self._floats = floats
        self._keeps_blocks = keeps_blocks
        self._found: Mapping[str, PackedLinear] = {}
        self._packed: dict[str, PackedLinear] = {}
        self._bytes: dict[str, int] = {}
        self._num_new = 0

    def pack(
        self,
        name: str,
        parts: Sequence[WeightPart],
        bias_N: torch.Tensor | None = None,
        *,
        least_bits: int = 4,
    ) -> LinearWeight:
        if len({part.shape[1] for part in parts}) != 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(f"{name}: parts of shapes {shapes} do not take the same inputs")
        floats = _at_least(self._floats, least_bits)
        formats = groupby(parts, lambda part: self._format_of(part, floats))
        pieces = [_Piece(format_, tuple(group)) for format_, group in formats]
        packed: list[PackedLinear] = []
        start = 0
        for number, piece in enumerate(pieces):
            stop = start + piece.num_outputs
            bias = None if bias_N is None else bias_N[start:stop]
            packed.append(self._find_or_pack(f"{name}/{number}", piece, bias))
            start = stop
        return packed[0] if len(packed) == 1 else PackedParts(tuple(packed))

    def pack_alone(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> PackedLinear:
        """A floating weight that is no part of the model's file."""
        return _PACKERS[self._floats](self._library, weight_NE, bias_N)

    def open(self, file: Path) -> None:
        found = map_packed(self._library, file, key=file.stem)
        self._found = {
            name: weight for name, weight in found.items() if isinstance(weight, PackedLinear)
        }

    def num_bytes_to_save(self) -> int:
        return sum(weight.num_bytes for weight in self._packed.values()) if self._num_new else 0

    def save(self, file: Path) -> None:
        save_packed(file, self._packed, key=file.stem)
        self._found, self._packed = {}, {}  # the model keeps what it uses

    def bytes_by_format(self) -> Mapping[str, int]:
        return dict(self._bytes)

    def _format_of(self, part: WeightPart, floats: str) -> str:
        if not self._keeps_blocks or not isinstance(part, QuantisedTensor):
            return floats
        if part.type_name in _CONVERSIONS:
            return _CONVERSIONS[part.type_name][0]
        return part.type_name if part.type_name in GGUF_KINDS else floats

    def _find_or_pack(self, name: str, piece: _Piece, bias_N: torch.Tensor | None) -> PackedLinear:
        weight = self._found.get(name)
        if weight is None or not piece.describes(weight):
            weight = _pack(self._library, piece, bias_N)
            self._num_new += piece.kind is not LinearKind.F32
        if piece.kind is not LinearKind.F32:
            self._packed[name] = weight
        self._bytes[piece.format] = self._bytes.get(piece.format, 0) + weight.num_bytes
        return weight


def _at_least(floats: str, least_bits: int) -> str:
    """The format chosen, or the smallest above it that has so many bits."""
    names = [name for name, _ in _BITS]
    return next(name for name, bits in _BITS[names.index(floats) :] if bits >= least_bits)


def _pack(library: NativeLibrary, piece: _Piece, bias_N: torch.Tensor | None) -> PackedLinear:
    pack_floats = _PACKERS.get(piece.format)
    if pack_floats is not None:
        floats = [
            part.dequantise() if isinstance(part, QuantisedTensor) else part.to(torch.float32)
            for part in piece.parts
        ]
        weight_NE = floats[0] if len(floats) == 1 else torch.cat(floats)
        return pack_floats(library, weight_NE, bias_N)
    rows = [_rows(part) for part in piece.parts if isinstance(part, QuantisedTensor)]
    blocks = rows[0] if len(rows) == 1 else np.concatenate(rows)
    return pack_gguf(library, blocks, piece.format, piece.num_outputs, piece.num_inputs, bias_N)


def _rows(part: QuantisedTensor) -> Bytes:
    rows: Bytes = part.ordered()["blocks"].numpy()
    if part.type_name in _CONVERSIONS:
        return _CONVERSIONS[part.type_name][1](rows)
    return rows
