"""The head of a GGUF file: metadata, and where each tensor lies, every range checked.

Read with `struct`: `gguf.GGUFReader` takes 2 to 10 s for a vocabulary and misreads truncated files.
Format (versions 2 and 3): https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import enum
import math
import mmap
import struct
from pathlib import Path
from typing import Any, Final

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile


class GgmlType(enum.IntEnum):
    """A tensor's type by its number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40


_T = GgmlType
BLOCKS: Final = {
    _T.F32: (1, 4),
    _T.F16: (1, 2),
    _T.Q4_0: (32, 18),
    _T.Q4_1: (32, 20),
    _T.Q5_0: (32, 22),
    _T.Q5_1: (32, 24),
    _T.Q8_0: (32, 34),
    _T.Q8_1: (32, 40),
    _T.Q2_K: (256, 84),
    _T.Q3_K: (256, 110),
    _T.Q4_K: (256, 144),
    _T.Q5_K: (256, 176),
    _T.Q6_K: (256, 210),
    _T.Q8_K: (256, 292),
    _T.IQ2_XXS: (256, 66),
    _T.IQ2_XS: (256, 74),
    _T.IQ3_XXS: (256, 98),
    _T.IQ1_S: (256, 50),
    _T.IQ4_NL: (32, 18),
    _T.IQ3_S: (256, 110),
    _T.IQ2_S: (256, 82),
    _T.IQ4_XS: (256, 136),
    _T.I8: (1, 1),
    _T.I16: (1, 2),
    _T.I32: (1, 4),
    _T.I64: (1, 8),
    _T.F64: (1, 8),
    _T.IQ1_M: (256, 56),
    _T.BF16: (1, 2),
    _T.TQ1_0: (256, 54),
    _T.TQ2_0: (256, 66),
    _T.MXFP4: (32, 17),
    _T.NVFP4: (64, 36),
}
"""Numbers in a block, and the bytes that they take."""
PLAIN = frozenset({_T.F64, _T.F32, _T.F16, _T.BF16})
BY_TORCH = frozenset({_T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K})
"""Dequantised by our own code; the others that are not plain, by the gguf package's."""
BY_GGUF = frozenset({
    _T.Q5_1, _T.Q2_K, _T.Q3_K, _T.TQ1_0, _T.TQ2_0, _T.MXFP4, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S,
    _T.IQ3_XXS, _T.IQ3_S, _T.IQ1_S, _T.IQ1_M, _T.IQ4_NL, _T.IQ4_XS,
})  # fmt: skip
SUPPORTED_TYPES = PLAIN | BY_TORCH | BY_GGUF


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
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
    """Attributes:
    metadata: numbers, strings, booleans and flat lists of them, by key.
    """

    file: Path
    metadata: dict[str, Any]
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

    def string(self) -> str:
        num_bytes = self.u64()
        start = self.advance(num_bytes)
        # byte-level vocabularies may hold tokens that are no UTF-8 on their own
        return self.data[start : start + num_bytes].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.u32(), self.u64()
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
        UnsupportedModelFile: big-endian, of an unknown version, or with a tensor type unknown to
            the installed gguf package.
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
    num_tensors, num_keys = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
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
    return GgufHeader(file, metadata, tuple(tensors.values()))


_TensorInfo = tuple[str, tuple[int, ...], GgmlType, int]


def _tensor_info(cursor: _Cursor, file: Path) -> _TensorInfo:
    name = cursor.string()
    num_dimensions = cursor.u32()
    if num_dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dimensions)]))
    kind, offset = cursor.u32(), cursor.u64()
    try:
        return name, shape, GgmlType(kind), offset
    except ValueError as error:
        raise UnsupportedModelFile(
            f"{file}: tensor {name!r} is of type {kind}, which is not known here; use another "
            f"quantisation such as Q8_0 or Q4_K"
        ) from error


def _num_bytes(name: str, shape: tuple[int, ...], quant_type: GgmlType) -> int:
    block_elements, block_bytes = BLOCKS[quant_type]
    if (shape[-1] if shape else 1) % block_elements:
        raise ValueError(
            f"tensor {name!r} has rows of {shape[-1]} elements, which {quant_type.name} cannot hold"
        )
    return math.prod(shape) // block_elements * block_bytes
