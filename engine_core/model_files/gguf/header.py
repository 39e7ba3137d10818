"""The head of a GGUF file: metadata, and where each tensor lies, every range checked.

Read with `struct`: `gguf.GGUFReader` takes 2 to 10 s for a vocabulary and misreads truncated files.
Format (versions 2 and 3): https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

import dataclasses
import enum
import math
import mmap
import struct
from pathlib import Path
from typing import Any, Final, Self

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile


class GgmlType(enum.IntEnum):
    """A tensor's type: its number in the file, the elements of a block, and a block's bytes."""

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36

    block_elements: int
    block_bytes: int

    def __new__(cls, number: int, block_elements: int, block_bytes: int) -> Self:
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.block_elements, kind.block_bytes = block_elements, block_bytes
        return kind


_T = GgmlType
_TYPES: Final = {kind.value: kind for kind in GgmlType}
SUPPORTED_TYPES = frozenset(GgmlType) - {
    _T.Q8_1, _T.Q8_K, _T.I8, _T.I16, _T.I32, _T.I64, _T.NVFP4,
}  # fmt: skip

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
# ten times what the largest files have; a damaged header must not fill the memory
_MAX_TENSORS = 1 << 18
_MAX_KEYS = 1 << 16
_MAX_ARRAY_ITEMS = 1 << 23
_MAX_STRING_BYTES = 1 << 26
_MAX_NAME_BYTES = 1 << 16
_STRING, _ARRAY = 8, 9
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file.

    Attributes:
        shape: as torch has it, rows first (GGUF writes the innermost dimension first).
        start_bytes: from the beginning of the file; its bytes are [start_bytes,
            start_bytes + num_bytes), which lie inside the file.
    """

    name: str
    shape: tuple[int, ...]
    quant_type: GgmlType
    start_bytes: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class GgufHeader:
    file: Path
    metadata: dict[str, Any]
    """Numbers, strings, booleans and flat lists of them, by key."""
    tensors: tuple[GgufTensor, ...]


class _Truncated(Exception):
    """The header runs past the end of the file."""


class _Cursor:
    """A reading position in the mapped file that never passes its end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def advance(self, num_bytes: int) -> int:
        """Offset before moving on by `num_bytes`, all of which exist."""
        start = self.offset
        if num_bytes > len(self.data) - start:
            raise _Truncated
        self.offset = start + num_bytes
        return start

    def u32(self) -> int:
        return int(_U32.unpack_from(self.data, self.advance(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self.data, self.advance(8))[0])

    def count(self, what: str, limit: int) -> int:
        """A number of things to follow, before room is made for them."""
        count = self.u64()
        if count > limit:
            raise ValueError(f"{count} {what}, the limit is {limit}")
        return count

    def string(self, limit: int = _MAX_NAME_BYTES) -> str:
        num_bytes = self.count("bytes in a text", limit)
        start = self.advance(num_bytes)
        # byte-level vocabularies may hold tokens that are no UTF-8 on their own
        return self.data[start : start + num_bytes].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string(_MAX_STRING_BYTES)
        if kind == _ARRAY:
            item_kind, count = self.u32(), self.count("items in a list", _MAX_ARRAY_ITEMS)
            if item_kind == _STRING:
                return self._strings(count)
            return list(self._scalars(item_kind, count))
        return self._scalars(kind, 1)[0]

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        if kind not in _SCALARS:
            raise ValueError(f"value of unknown type {kind}")
        code = _SCALARS[kind]
        start = self.advance(struct.calcsize(f"<{code}") * count)
        return struct.unpack_from(f"<{count}{code}", self.data, start)

    def _strings(self, count: int) -> list[str]:
        # the hot loop of opening a file: a quarter of a million short strings
        data, offset, end = self.data, self.offset, len(self.data)
        if count > (end - offset) // 8:
            raise _Truncated
        strings: list[str] = []
        for _ in range(count):
            start = offset + 8
            if start > end:
                raise _Truncated
            offset = start + _U64.unpack_from(data, start - 8)[0]
            if offset > end:
                raise _Truncated
            strings.append(data[start:offset].decode("utf-8", errors="replace"))
        self.offset = offset
        return strings


def read_gguf_header(file: Path) -> GgufHeader:
    """Metadata and tensor directory of `file`.

    Raises:
        BrokenModelFile: not a GGUF file, or not all of one.
        UnsupportedModelFile: big-endian, of an unknown version, or with an unknown tensor type.
    """
    try:
        with file.open("rb") as stream:
            prefix = stream.read(8)
            if len(prefix) < 8 or prefix[:4] != _MAGIC:
                raise BrokenModelFile(
                    f"{file} is not a GGUF file: it begins with {prefix[:4]!r}, not with "
                    f"{_MAGIC!r}; download it again"
                )
            _check_version(file, prefix[4:])
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(file, data)
    except OSError as error:
        raise BrokenModelFile(f"{file} cannot be read: {error.strerror}; check it") from error
    except _Truncated as error:
        raise BrokenModelFile(
            f"{file} is truncated: its header runs past its end ({file.stat().st_size} bytes); "
            f"download it again"
        ) from error
    except (ValueError, OverflowError, MemoryError, struct.error) as error:
        raise BrokenModelFile(
            f"{file} has an unreadable header: {error}; download it again"
        ) from error


def _check_version(file: Path, raw: bytes) -> None:
    version = int(_U32.unpack(raw)[0])
    if version in _VERSIONS:
        return
    if int.from_bytes(raw, "big") in _VERSIONS:
        raise UnsupportedModelFile(
            f"{file} is a big-endian GGUF file; convert it with gguf's gguf_convert_endian, or "
            f"use a little-endian one"
        )
    raise UnsupportedModelFile(
        f"{file} is a GGUF file of version {version}, versions 2 and 3 are read; convert the "
        f"model again with a current llama.cpp"
    )


def _parse(file: Path, data: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(data)
    cursor.advance(8)
    num_tensors = cursor.count("tensors", _MAX_TENSORS)
    num_keys = cursor.count("keys", _MAX_KEYS)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"key {key!r} occurs twice")
        metadata[key] = cursor.value(cursor.u32())
    infos = [_tensor_info(cursor, file) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise ValueError(f"alignment {alignment!r} is not a power of two from 8 up")
    data_start = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, quant_type, offset in infos:
        if name in tensors:
            raise ValueError(f"tensor {name!r} occurs twice")
        if offset % alignment:
            raise ValueError(f"tensor {name!r} begins at {offset}, not aligned to {alignment}")
        start = data_start + offset
        num_bytes = _num_bytes(name, shape, quant_type)
        if start + num_bytes > len(data):
            raise BrokenModelFile(
                f"{file} is truncated: tensor {name!r} ends at byte {start + num_bytes}, the file "
                f"has {len(data)}; download it again"
            )
        tensors[name] = GgufTensor(name, shape, quant_type, start, num_bytes)
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start_bytes):
        if tensor.start_bytes < end:
            raise ValueError(
                f"tensor {tensor.name!r} begins at byte {tensor.start_bytes}, inside the one "
                f"before it, which ends at {end}"
            )
        end = tensor.start_bytes + tensor.num_bytes
    return GgufHeader(file, metadata, tuple(tensors.values()))


def _tensor_info(cursor: _Cursor, file: Path) -> tuple[str, tuple[int, ...], GgmlType, int]:
    name = cursor.string()
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dimensions)]))
    if 0 in shape:
        raise ValueError(f"tensor {name!r} has shape {list(shape)}, a dimension of 0")
    kind, offset = cursor.u32(), cursor.u64()
    if kind not in _TYPES:
        raise UnsupportedModelFile(
            f"{file}: tensor {name!r} is of type {kind}, which is not known here; use another "
            f"quantisation such as Q8_0 or Q4_K"
        )
    return name, shape, _TYPES[kind], offset


def _num_bytes(name: str, shape: tuple[int, ...], quant_type: GgmlType) -> int:
    row = shape[-1] if shape else 1
    if row % quant_type.block_elements:
        raise ValueError(
            f"tensor {name!r} has rows of {row} elements, which {quant_type.name} cannot hold"
        )
    return math.prod(shape) // quant_type.block_elements * quant_type.block_bytes
