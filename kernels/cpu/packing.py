"""The weights of one model in the native library's layouts; saved once, mapped by later starts."""

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, repeat
from pathlib import Path
from typing import Any, Literal

import torch

from kernels.cpu.experts import NativeExpertWeights
from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import PackedParts
from kernels.cpu.weights import (
    GGUF_KINDS,
    LinearKind,
    PackedLinear,
    pack_bfloat16,
    pack_float,
    pack_parts,
    packed_linear,
    quantise_int4,
    quantise_int8,
)
from kernels.interface.weights import (
    ExpertActivation,
    ExpertBiases,
    LinearWeight,
    PackedFileError,
    QuantisedTensor,
    WeightPart,
    mxfp4_as_gguf,
)

_MAGIC = b"ec-packed-lin-03"  # the layouts of src/linear.h are part of the version
_START = struct.Struct("<16sQQI28x")
_ALIGNMENT = 64
_FIELDS = ("blob", "row_scales", "bias")


def save_packed(path: Path, weights: Mapping[str, PackedLinear], *, key: str) -> None:
    """Write `weights` to `path`, in place of what is there.

    The file:

        offset 0   magic [16] | header bytes, u64 | file bytes, u64 | crc32 of the header | zeros
              64   header: JSON
               .   tensors, each aligned to 64

    Numbers are little-endian. A file gets its name when it is complete. Reading checks the header's
    sum, the file's length and every range, but does not sum the tensors, which would read them all
    at start: a flipped bit there is a wrong weight, never a wrong address.
    `key`: what the weights were made from; `map_packed` checks it. Raises OSError: the folder
    cannot be written, or is full."""
    tensors: list[tuple[int, torch.Tensor]] = []
    end = 0

    def place(tensor: torch.Tensor | None) -> list[int] | None:
        nonlocal end
        if tensor is None:
            return None
        flat = tensor.view(torch.uint8)
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
        tensors.append((at, flat))
        end = at + flat.numel()
        return [at, flat.numel()]

    records: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        shape = {"outputs": weight.num_outputs, "inputs": weight.num_inputs}
        places = {field: place(getattr(weight, field)) for field in _FIELDS}
        records[name] = {"kind": weight.kind.name, **shape, **places}
    header = json.dumps({"key": key, "weights": records}).encode()
    first = _first_tensor(len(header))
    start = _START.pack(_MAGIC, len(header), first + end, zlib.crc32(header))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix="packing-", delete=False) as file:
        try:
            file.write(start + header)
            for at, flat in tensors:
                file.seek(first + at)
                file.write(flat.numpy().data)
            file.truncate(first + end)
            file.flush()
            os.fsync(file.fileno())  # a rename that survives a crash must not name an empty file
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def map_packed(library: NativeLibrary, path: Path, *, key: str) -> dict[str, PackedLinear]:
    """The weights that `save_packed` wrote, over the file's own pages.

    They are read when they are first used. The file may be replaced or removed meanwhile, and must
    not be cut short in place.
    Raises PackedFileError: no such file, one of another kind, version or key, or a damaged one."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _START.size:
                raise PackedFileError(f"{path} has {size} bytes: it is no file of packed weights")
            # private and writable, as torch would warn of memory that is not; never written
            pages = mmap.mmap(
                file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
            )
    except OSError as error:
        raise PackedFileError(f"{path} cannot be read ({error})") from error
    magic, header_bytes, file_bytes, checksum = _START.unpack_from(pages)
    if magic != _MAGIC:
        raise PackedFileError(f"{path} is no file of packed weights of this version")
    if file_bytes != size:
        raise PackedFileError(f"{path} has {size} bytes and should have {file_bytes}")
    header = pages[_START.size : _START.size + header_bytes]
    if len(header) != header_bytes or zlib.crc32(header) != checksum:
        raise PackedFileError(f"{path} has a damaged header")
    described = json.loads(header)
    if described["key"] != key:
        raise PackedFileError(
            f"{path} was packed from other weights: its key is {described['key']!r}, wanted {key!r}"
        )
    first = _first_tensor(header_bytes)
    tensors = torch.frombuffer(pages, dtype=torch.uint8)[first:]
    try:
        return {
            name: _weight(library, tensors, record) for name, record in described["weights"].items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise PackedFileError(f"{path} holds a weight that does not fit: {error}") from error


def _weight(
    library: NativeLibrary, tensors: torch.Tensor, record: Mapping[str, Any]
) -> PackedLinear:
    blob, scales, bias = (_slice(tensors, record[field]) for field in _FIELDS)
    if blob is None:
        raise ValueError("it has no codes")
    floats = (None if each is None else each.view(torch.float32) for each in (bias, scales))
    kind = LinearKind[record["kind"]]
    return packed_linear(library, kind, record["outputs"], record["inputs"], blob, *floats)


def _slice(tensors: torch.Tensor, place: list[int] | None) -> torch.Tensor | None:
    if place is None:
        return None
    at, num_bytes = place
    if at < 0 or num_bytes < 0 or at % _ALIGNMENT or at + num_bytes > tensors.numel():
        raise ValueError(f"bytes {at} to {at + num_bytes} of {tensors.numel()}")
    return tensors[at : at + num_bytes]


def _first_tensor(header_bytes: int) -> int:
    return -(-(_START.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT


FloatFormat = Literal["float32", "bfloat16", "int8", "int4"]

_FLOAT32 = "float32"
_PACKERS = {
    _FLOAT32: pack_float,
    "bfloat16": pack_bfloat16,
    "int8": quantise_int8,
    "int4": quantise_int4,
}
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
        of_sides: tuple[Iterable[torch.Tensor | None], ...] = biases or (repeat(None),) * 2
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
        self._found = map_packed(self._library, file, key=file.stem)

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
        format_ = _RUN_AS.get(part.type_name, part.type_name)
        return format_ if format_ in GGUF_KINDS else floats

    def _find_or_pack(self, name: str, piece: _Piece, bias_N: torch.Tensor | None) -> PackedLinear:
        weight = self._found.get(name)
        wanted = (piece.kind, *piece.shape)
        is_float = piece.kind in _FLOAT_KINDS  # packed as fast as read
        if weight is None or wanted != (weight.kind, weight.num_outputs, weight.num_inputs):
            weight = _pack(self._library, piece, bias_N)
            self._num_new += not is_float
        if not is_float:
            self._packed[name] = weight
        self._bytes[piece.format] = self._bytes.get(piece.format, 0) + weight.num_bytes
        return weight


def _at_least(floats: str, least_bits: int) -> str:
    """The format chosen, or the smallest above it that has so many bits."""
    names = [name for name, _ in _BITS]
    return next(name for name, bits in _BITS[names.index(floats) :] if bits >= least_bits)


def _pack(library: NativeLibrary, piece: _Piece, bias_N: torch.Tensor | None) -> PackedLinear:
    if piece.kind in _FLOAT_KINDS:
        return pack_parts(library, piece.kind, piece.parts, bias_N)
    quantise = _PACKERS.get(piece.format)
    if quantise is None:
        return pack_parts(library, piece.kind, [_as_gguf(part) for part in piece.parts], bias_N)
    floats = [
        part.dequantise() if isinstance(part, QuantisedTensor) else part.to(torch.float32)
        for part in piece.parts
    ]
    weight_NE = floats[0] if len(floats) == 1 else torch.cat(floats)
    return quantise(library, weight_NE, bias_N)


def _as_gguf(part: WeightPart) -> WeightPart:
    if not isinstance(part, QuantisedTensor) or part.type_name != "mxfp4":
        return part
    blocks = mxfp4_as_gguf(part.ordered())
    return replace(part, type_name="MXFP4", arrays={"blocks": blocks}, row_order_N=None)
