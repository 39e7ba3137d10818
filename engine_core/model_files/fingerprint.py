"""A cheap content hash of model files: whole small files and spread samples of large ones, so
that 100 GB cost milliseconds. Paths and times do not count: a copied model is the same model."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

_WHOLE_FILE_BYTES = 4 << 20
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def fingerprint_files(files: Iterable[Path]) -> str:
    """Hash of the files' sizes and (sampled) bytes, in the order given.
    Raises OSError: a file cannot be read.

    Returns:
        32 hex digits.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        size_bytes = file.stat().st_size
        digest.update(f"{size_bytes};".encode())
        with file.open("rb") as stream:
            if size_bytes <= _WHOLE_FILE_BYTES:
                digest.update(stream.read())
                continue
            last_start = size_bytes - _SAMPLE_BYTES
            for index in range(_NUM_SAMPLES):
                stream.seek(last_start * index // (_NUM_SAMPLES - 1))
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
