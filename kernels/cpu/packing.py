"""The weights of one model in the native library's layouts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from pathlib import Path
from typing import Literal

import torch

from kernels.cpu.experts import NativeExpertWeights
from kernels.cpu.grouped_codes import as_blocks
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import PackedParts
from kernels.cpu.packed_file import PackedFileWriter, map_packed
from kernels.cpu.weights import (
    GGUF_KINDS,
    LinearKind,
    PackedLinear,
    pack_bfloat16,
    pack_float,
    pack_parts,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.weights import (
    ExpertActivation,
    ExpertBiases,
    LinearWeight,
    QuantisedTensor,
    WeightPart,
    mxfp4_as_gguf,
)

FloatFormat = Literal["float32", "bfloat16", "int8", "int4"]

_FLOAT32 = "float32"
_QUANTISERS = {"int8": quantise_int8, "int4": quantise_int4}
_PACKERS = {_FLOAT32: pack_float, "bfloat16": pack_bfloat16, **_QUANTISERS}
_ROOM_BYTES = 1 << 20
"""Beside twice the weights: for small ones' scales, biases and alignment."""
_BITS: tuple[tuple[str, int], ...] = (
    ("int4", 4),
    ("int8", 8),
    ("bfloat16", 16),
    (_FLOAT32, 32),
)
_KINDS = GGUF_KINDS | {
    _FLOAT32: LinearKind.F32,
    "bfloat16": LinearKind.BF16,
    "int8": LinearKind.I8_ROW,
    "int4": LinearKind.Q4_MINIMUM,
}
_FLOAT_KINDS = (LinearKind.F32, LinearKind.BF16)
_RUN_AS = {"Q5_0": "Q8_0", "mxfp4": "MXFP4"}
"""Types that run as another which holds the same numbers."""

BLOCK_TYPES = frozenset(GGUF_KINDS) | frozenset(_RUN_AS)
"""The types that stay blocks."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Neighbouring parts of one format, which become one weight."""

    format: str
    parts: tuple[WeightPart, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def kind(self) -> LinearKind:
        return _KINDS[self.format]


class NativePacking:
    """
    Args:
        library: packs and gathers.
        floats: the format of floating parts, see `kernels.cpu.weights`.
        keeps_blocks: quantised parts of BLOCK_TYPES stay as they are; else they are dequantised,
            and become `floats`.

    Raises:
        ValueError: another name for `floats`.
    """

    def __init__(
        self, library: NativeLibrary, floats: FloatFormat = "float32", *, keeps_blocks: bool = True
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
        self._writer: PackedFileWriter | None = None
        self._refusal: OSError | None = None
        self._num_new = self._num_mapped_bytes = 0

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
            stop = start + piece.shape[0]
            bias = None if bias_N is None else bias_N[start:stop]
            packed.append(self._find_or_pack(f"{name}/{number}", piece, bias))
            start = stop
        return packed[0] if len(packed) == 1 else PackedParts(tuple(packed))

    def pack_alone(
        self, weight_NE: torch.Tensor, bias_N: torch.Tensor | None = None
    ) -> PackedLinear:
        """A floating weight that is no part of the model's file."""
        return _PACKERS[self._floats](self._library, weight_NE, bias_N)

    def pack_experts(
        self,
        name: str,
        gate_up: Sequence[WeightPart],
        down: Sequence[WeightPart],
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
    ) -> NativeExpertWeights:
        sides: list[list[PackedLinear]] = []
        of_sides: tuple[Iterable[torch.Tensor | None], ...] = (repeat(None),) * 2
        if biases is not None:  # of a model on a device, whose experts stay here
            of_sides = tuple(each.to("cpu", torch.float32) for each in biases)
        gate_up, down = (
            [part.cpu() if isinstance(part, torch.Tensor) else part for part in side]
            for side in (gate_up, down)
        )
        for side, parts, of_side in zip(
            ("gate_up", "down"), (gate_up, down), of_sides, strict=True
        ):
            formats = {self._format_of(part, self._floats) for part in parts}
            one = formats.pop() if len(formats) == 1 else self._floats
            size = len(parts) // len(down)
            pieces = [_Piece(one, tuple(parts[i : i + size])) for i in range(0, len(parts), size)]
            sides.append(
                [
                    self._find_or_pack(f"{name}.{side}/{expert}", piece, bias)
                    for expert, (piece, bias) in enumerate(zip(pieces, of_side, strict=False))
                ]
            )
        return NativeExpertWeights(self._library, sides[0], sides[1], activation)

    def open(self, file: Path) -> None:
        self._found = map_packed(self._library, file)

    def create(self, folder: Path, most_bytes: int) -> None:
        self._writer = PackedFileWriter(folder, most_bytes)

    def num_bytes_to_save(self) -> int:
        return sum(weight.num_bytes for weight in self._packed.values()) if self._num_new else 0

    def save(self, file: Path, made_of: Iterable[str] = ()) -> Callable[[], None]:
        if self._refusal is not None:
            raise self._refusal
        num_bytes = 2 * self.num_bytes_to_save() + _ROOM_BYTES
        writer, self._writer = self._writer or PackedFileWriter(file.parent, num_bytes), None
        packed, self._found, self._packed = self._packed, {}, {}  # the model keeps what it uses
        return writer.finish(file, packed, made_of)

    def num_mapped_bytes(self) -> int:
        return self._num_mapped_bytes

    def bytes_by_format(self) -> Mapping[str, int]:
        return dict(self._bytes)

    def _format_of(self, part: WeightPart, floats: str) -> str:
        if not self._keeps_blocks or not isinstance(part, QuantisedTensor):
            return floats
        format_ = part.blocks or _RUN_AS.get(part.type_name, part.type_name)
        return format_ if format_ in GGUF_KINDS else floats

    def _reserve(self, num_bytes: int) -> torch.Tensor:
        """Memory of the file while there is one."""
        if self._writer is not None:
            try:
                memory = self._writer.reserve(num_bytes)
                self._num_mapped_bytes += num_bytes
                return memory
            except OSError as error:
                self._writer.discard()
                self._writer, self._refusal = None, error
        return self._library.memory.reserve(num_bytes)

    def _find_or_pack(self, name: str, piece: _Piece, bias_N: torch.Tensor | None) -> PackedLinear:
        weight = self._found.get(name)
        wanted = (piece.kind, *piece.shape)
        is_float = piece.kind in _FLOAT_KINDS  # packed as fast as read
        if weight is None or wanted != (weight.kind, weight.num_outputs, weight.num_inputs):
            weight = self._pack(piece, bias_N)
            self._num_new += not is_float
        else:
            self._num_mapped_bytes += weight.num_bytes
        if not is_float:
            self._packed[name] = weight
        self._bytes[piece.format] = self._bytes.get(piece.format, 0) + weight.num_bytes
        return weight

    def _pack(self, piece: _Piece, bias_N: torch.Tensor | None) -> PackedLinear:
        library, reserve = self._library, self._reserve
        if piece.kind in _FLOAT_KINDS:
            return pack_parts(library, piece.kind, piece.parts, bias_N)
        quantise = _QUANTISERS.get(piece.format)
        if quantise is None:
            parts = [_as_gguf(part) for part in piece.parts]
            return pack_parts(library, piece.kind, parts, bias_N, reserve=reserve)
        floats = [
            part.dequantise() if isinstance(part, QuantisedTensor) else part.to(torch.float32)
            for part in piece.parts
        ]
        weight_NE = floats[0] if len(floats) == 1 else torch.cat(floats)
        return quantise(library, weight_NE, bias_N, reserve=reserve)


def _at_least(floats: str, least_bits: int) -> str:
    """The format chosen, or the smallest above it that has so many bits."""
    names = [name for name, _ in _BITS]
    return next(name for name, bits in _BITS[names.index(floats) :] if bits >= least_bits)


def _as_gguf(part: WeightPart) -> WeightPart:
    if not isinstance(part, QuantisedTensor) or not part.blocks:
        return part
    blocks = mxfp4_as_gguf(part.ordered()) if part.type_name == "mxfp4" else as_blocks(part)
    arrays = {"blocks": blocks}
    return replace(part, type_name=part.blocks, arrays=arrays, row_order_N=None, blocks="")
