"""Quantised weights in the form that a backend runs, kept on disk for the next start."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

from kernels.interface.weights import PackedFileError, WeightPacking
from protocol.private_files import foreign_owner

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 8 << 30
_SUFFIX = ".weights"
_RULES = 2
"""Counts how a model's tensors become layers' weights: goes up when other numbers come out."""
_ABANDONED_S = 3600.0
"""Since the last change of a file without our suffix: its writer has died."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedWeightCache:
    """A file is named by what it was made from: size, time of last change and sampled bytes of the
    model's files (`ModelFiles.fingerprint`), and the format. Hashing all bytes would read a large
    model whole at every start; samples alone would miss a small change in place, which the time of
    change shows. A copy of the model is packed once more.

    Args:
        folder: made when it is first written to.
        limit_bytes: of all files together; the least recently used go first. 0: nothing
            is read or written.
    """

    folder: Path
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def file_for(self, fingerprint: str, weight_files: Iterable[Path], packed_as: str) -> Path:
        """Where the weights of a model are in a format, if they are kept.
        Raises OSError: a weight file is gone.

        Args:
            fingerprint: of the model's files, see `ModelFiles.fingerprint`.
            packed_as: what distinguishes weights that were made of the same files.
        """
        digest = hashlib.blake2b(f"{_RULES};{packed_as};{fingerprint}".encode(), digest_size=16)
        for file in weight_files:
            status = file.stat()
            digest.update(f";{status.st_size};{status.st_mtime_ns}".encode())
        return self.folder / f"{digest.hexdigest()}{_SUFFIX}"

    def open(self, packing: WeightPacking, file: Path) -> bool:
        """Let `packing` take what `file` holds. A file that it refuses is removed, with a line.
        Returns whether there was anything to take."""
        if not self.limit_bytes or not file.is_file():
            return False
        try:
            if (owner := foreign_owner(file)) is not None:
                raise PackedFileError(f"{file} belongs to another user ({owner})")
            packing.open(file)
        except (PackedFileError, OSError) as error:
            logger.warning("the weights are packed anew: %s", error)
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
            return False
        with contextlib.suppress(OSError):  # a folder that may only be read
            os.utime(file)  # used now: the last to go
        return True

    def save(self, packing: WeightPacking, file: Path) -> None:
        """Keep what was packed anew, if there is room for it. Never fails: the log says why not."""
        num_bytes = packing.num_bytes_to_save()
        if not self.limit_bytes or not num_bytes:
            return
        if num_bytes > self.limit_bytes:
            logger.info(
                "the packed weights are not kept for the next start: %d MiB, --weight-cache is "
                "%d MiB",
                num_bytes >> 20,
                self.limit_bytes >> 20,
            )
            return
        started_s = time.monotonic()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(num_bytes, but=file)
            packing.save(file)
        except OSError as error:
            logger.warning("the packed weights cannot be kept for the next start: %s", error)
            return
        took_s = time.monotonic() - started_s
        logger.info("kept packed weights for the next start in %.1f s: %s", took_s, file)

    def _make_room(self, num_bytes: int, *, but: Path) -> None:
        """Remove files until `num_bytes` more fit, the least recently used first."""
        for file in self.folder.iterdir():
            is_ours = file.suffix == _SUFFIX
            with contextlib.suppress(FileNotFoundError):  # another rank's, which has its name now
                if not is_ours and time.time() - file.stat().st_mtime > _ABANDONED_S:
                    file.unlink(missing_ok=True)
        kept = [file for file in self.folder.glob(f"*{_SUFFIX}") if file != but]
        used = {file: file.stat() for file in kept}
        total_bytes = sum(status.st_size for status in used.values())
        for file in sorted(kept, key=lambda file: used[file].st_mtime_ns):
            if total_bytes + num_bytes <= self.limit_bytes:
                return
            file.unlink(missing_ok=True)
            total_bytes -= used[file].st_size
