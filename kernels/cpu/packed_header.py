"""What a file of packed weights says of itself. Loads no torch."""

import contextlib
import fcntl
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any, BinaryIO

SUFFIX = ".weights"
START = struct.Struct("<16sQQI28x")
_MAGIC = b"ec-packed-lin-06"  # the layouts of src/linear.h are part of the version


def write_start(header: bytes, header_at: int) -> bytes:
    """The first bytes of a file whose `header` begins at `header_at`, behind all else."""
    return START.pack(_MAGIC, header_at, len(header), zlib.crc32(header))


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and where it begins. Raises OSError, and ValueError: no file of packed weights,
    one of another version, or a damaged one; the text goes behind the file's name."""
    size = os.fstat(file.fileno()).st_size
    if size < START.size:
        raise ValueError(f"has {size} bytes: it is no file of packed weights")
    magic, header_at, header_bytes, checksum = START.unpack(file.read(START.size))
    if magic != _MAGIC:
        raise ValueError("is no file of packed weights of this version")
    if header_at + header_bytes != size:
        raise ValueError(f"has {size} bytes and should have {header_at + header_bytes}")
    file.seek(header_at)
    header = file.read(header_bytes)
    if zlib.crc32(header) != checksum:
        raise ValueError("has a damaged header")
    described: dict[str, Any] = json.loads(header)
    return described, header_at


def remove_abandoned(folder: Path) -> None:
    """Remove what a process was packing into `folder` that died."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # it is being written, or others remove it
            if path.suffix != SUFFIX:
                with path.open("r+b") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def origins(folder: Path) -> dict[Path, list[str]]:
    """The files of packed weights in `folder`, and the paths of what each was made of."""
    found: dict[Path, list[str]] = {}
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(OSError, ValueError), path.open("rb") as file:  # a start says it
            found[path] = read_header(file)[0]["made_of"]
    return found
