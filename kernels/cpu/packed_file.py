"""A file of packed weights: the memory that they are packed into, and mapped by later starts."""

import fcntl
import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kernels.cpu.library import NativeLibrary
from kernels.cpu.packed_header import START, read_header, write_start
from kernels.cpu.weights import LinearKind, PackedLinear, packed_linear
from kernels.interface.weights import PackedFileError

_ALIGNMENT = 64
_TAKEN_AT_ONCE = 64 << 20
"""Bytes: what the file grows by."""
_FIELDS = ("blob", "row_scales", "bias")


class PackedFileWriter:
    """Memory for weights, whose pages are those of a file: they are not in memory twice, and the
    system may write them to disk and drop them. Without `finish` the file goes with this object,
    and at once by `discard`; what was reserved stays as long as it is used.

        offset 0   magic [16] | header's offset, u64 | its bytes, u64 | its crc32, u32 | zeros
              64   tensors, each aligned to 64
               .   header, to the end: JSON

    Numbers are little-endian. The file gets its start and its name when all else is on the disk.

    Args:
        folder: made if there is none.
        most_bytes: that the tensors may take.

    Raises:
        OSError: the folder cannot be written, or the system maps no such file.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = tempfile.NamedTemporaryFile(dir=folder, prefix="packing-", delete=False)  # noqa: SIM115
        self.discard = weakref.finalize(self, _remove, self._file)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # until this process ends: `remove_abandoned`
        self._used = self._taken = START.size
        self._unmapped = 0
        self._file.truncate(START.size + most_bytes)  # takes nothing of the disk yet
        self._pages = mmap.mmap(self._file.fileno(), START.size + most_bytes)
        self._address = torch.frombuffer(self._pages, dtype=torch.uint8).data_ptr()

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of any content, its first byte aligned to 64.
        Raises OSError: the disk is full, or `most_bytes` are taken."""
        start, end = self._used, self._used + num_bytes
        if end > len(self._pages):
            raise OSError(f"they take more than the {len(self._pages) >> 20} MiB they may have")
        if end > self._taken:  # on the disk: a page without a place there is a SIGBUS
            taken = min(max(end, self._taken + _TAKEN_AT_ONCE), len(self._pages))
            os.posix_fallocate(self._file.fileno(), self._taken, taken - self._taken)
            self._taken = taken
            self._unmap_packed()
        self._used = min(-(-end // _ALIGNMENT) * _ALIGNMENT, len(self._pages))
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes, offset=start)

    def finish(
        self, path: Path, weights: Mapping[str, PackedLinear], made_of: Iterable[str] = ()
    ) -> Callable[[], None]:
        """Describe `weights` in the header; those that lie elsewhere are copied. `path`: the file's
        name; its stem is in the header. `made_of`: paths of the model's files, for `origins`.

        Returns what puts the file on the disk and gives it its name, in place of what is there; for
        another thread, as it waits. Both raise OSError: the disk is full."""
        records: dict[str, dict[str, Any]] = {}
        for name, weight in weights.items():
            shape = {"outputs": weight.num_outputs, "inputs": weight.num_inputs}
            places = {field: self._place(getattr(weight, field)) for field in _FIELDS}
            records[name] = {"kind": weight.kind.name, **shape, **places}
        self._unmap_packed()
        described = {"key": path.stem, "made_of": list(made_of), "weights": records}
        header = json.dumps(described).encode()
        self._file.truncate(self._used)
        self._file.seek(self._used)
        self._file.write(header)
        self._file.flush()
        start = write_start(header, self._used)

        def put() -> None:
            with self._file as file:
                os.fsync(file.fileno())
                os.pwrite(file.fileno(), start, 0)
                os.fsync(file.fileno())
                Path(file.name).replace(path)
                self.discard.detach()

        return put

    def _unmap_packed(self) -> None:
        """Leave what is packed to the file's pages, until it is used: beside the model's file it
        would be in this process twice."""
        start, stop = self._unmapped, self._used // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._pages.madvise(mmap.MADV_DONTNEED, start, stop - start)
            self._unmapped = stop

    def _place(self, tensor: torch.Tensor | None) -> list[int] | None:
        if tensor is None:
            return None
        flat = tensor.view(torch.uint8)
        at = flat.data_ptr() - self._address
        if not 0 <= at < len(self._pages):
            place = self.reserve(flat.numel())
            place.copy_(flat)
            at = place.data_ptr() - self._address
        return [at, flat.numel()]


def _remove(file: "tempfile._TemporaryFileWrapper[bytes]") -> None:
    Path(file.name).unlink(missing_ok=True)
    file.close()


def map_packed(library: NativeLibrary, path: Path) -> dict[str, PackedLinear]:
    """The weights that a `PackedFileWriter` has put there, over the file's own pages.

    They are read when they are first used. The file may be replaced or removed meanwhile, and must
    not be cut short in place. Its header's sum, its length and every range are checked, but not the
    tensors, which would read them all at start: a flipped bit there is a wrong weight, never a
    wrong address.
    Raises PackedFileError: no such file, one of another kind, version or name, or a damaged one."""
    try:
        with path.open("rb") as file:
            described, header_at = read_header(file)
            # private and writable, as torch would warn of memory that is not; never written
            pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise PackedFileError(f"{path} cannot be read ({error})") from error
    except ValueError as error:
        raise PackedFileError(f"{path} {error}") from error
    if described["key"] != path.stem:
        raise PackedFileError(
            f"{path} was packed from other weights: its key is {described['key']!r}, wanted "
            f"{path.stem!r}"
        )
    tensors = torch.frombuffer(pages, dtype=torch.uint8)[:header_at]
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
