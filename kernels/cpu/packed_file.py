"""Packed weights in a file: saved once, mapped by every later start.

Owns the file's layout. Must not know models or caches: the caller chooses the path, and the key
that says what the weights were made from.

    offset 0   magic [16] | header bytes, u64 | file bytes, u64 | crc32 of the header, u32 | zeros
          64   header: JSON
           .   tensors, each aligned to 64

Numbers are little-endian, as in the packed weights themselves. A file appears whole or not at all
(written under another name, then renamed). Reading checks the header's sum, the file's length and
every range before a weight is made; the bytes of the tensors are not summed, which would read them
all at start: a flipped bit there is a wrong weight, never a wrong address.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.linear import PackedParts
from kernels.cpu.weights import LinearKind, PackedLinear, packed_linear
from kernels.interface.weights import PackedFileError

Weights = Mapping[str, PackedLinear | PackedParts]

_MAGIC = b"ec-packed-lin-02"  # the layouts of src/linear.h are part of the version
_START = struct.Struct("<16sQQI28x")
_ALIGNMENT = 64
_FIELDS = ("blob", "row_scales", "bias")


def save_packed(path: Path, weights: Weights, *, key: str) -> None:
    """Write `weights` to `path`, in place of what is there.

    A weight that stands under several names is written once.

    Args:
        key: what the weights were made from; `map_packed` asks for the same.

    Raises:
        OSError: the folder cannot be written, or is full.
    """
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

    records: list[dict[str, Any]] = []
    indices: dict[int, int] = {}
    names: dict[str, int | list[int]] = {}

    def index_of(weight: PackedLinear) -> int:
        if id(weight) not in indices:
            indices[id(weight)] = len(records)
            shape = {"outputs": weight.num_outputs, "inputs": weight.num_inputs}
            places = {field: place(getattr(weight, field)) for field in _FIELDS}
            records.append({"kind": weight.kind.name, **shape, **places})
        return indices[id(weight)]

    for name, weight in weights.items():
        if isinstance(weight, PackedParts):
            names[name] = [index_of(part) for part in weight.parts]
        else:
            names[name] = index_of(weight)
    header = json.dumps({"key": key, "names": names, "weights": records}).encode()
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


def map_packed(
    library: NativeLibrary, path: Path, *, key: str
) -> dict[str, PackedLinear | PackedParts]:
    """The weights that `save_packed` wrote, over the file's own pages.

    They are read when they are first used. The file may be replaced or removed meanwhile, and must
    not be cut short in place.

    Raises:
        PackedFileError: no such file, one of another kind, version or key, or a damaged one.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _START.size:
                raise PackedFileError(f"{path} has {size} bytes: it is no file of packed weights")
            # private and writable, as torch would warn of memory that is not; nobody writes
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
        weights = [_weight(library, tensors, record) for record in described["weights"]]
    except (ValueError, KeyError, TypeError) as error:
        raise PackedFileError(f"{path} holds a weight that does not fit: {error}") from error
    return {
        name: weights[at] if isinstance(at, int) else PackedParts(tuple(weights[i] for i in at))
        for name, at in described["names"].items()
    }


def _weight(
    library: NativeLibrary, tensors: torch.Tensor, record: Mapping[str, Any]
) -> PackedLinear:
    fields = {field: _slice(tensors, record[field]) for field in _FIELDS}
    blob = fields["blob"]
    if blob is None:
        raise ValueError("it has no codes")
    return packed_linear(
        library,
        LinearKind[record["kind"]],
        record["outputs"],
        record["inputs"],
        blob=blob,
        row_scales=_floats(fields["row_scales"]),
        bias=_floats(fields["bias"]),
    )


def _slice(tensors: torch.Tensor, place: list[int] | None) -> torch.Tensor | None:
    if place is None:
        return None
    at, num_bytes = place
    if at < 0 or num_bytes < 0 or at % _ALIGNMENT or at + num_bytes > tensors.numel():
        raise ValueError(f"bytes {at} to {at + num_bytes} of {tensors.numel()}")
    return tensors[at : at + num_bytes]


def _floats(flat: torch.Tensor | None) -> torch.Tensor | None:
    return None if flat is None else flat.view(torch.float32)


def _first_tensor(header_bytes: int) -> int:
    return -(-(_START.size + header_bytes) // _ALIGNMENT) * _ALIGNMENT
