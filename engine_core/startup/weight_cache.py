"""Quantised weights in the form that a backend runs, kept on disk for the next start."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from kernels.cpu.packed_header import SUFFIX, remove_abandoned
from kernels.interface.weights import PackedFileError, WeightPacking
from protocol.private_files import foreign_owner

logger = logging.getLogger(__name__)

DEFAULT_LIMIT_BYTES = 8 << 30
_RULES = 2
"""Counts how a model's tensors become layers' weights: goes up when other numbers come out."""
_NOT_KEPT = "the packed weights cannot be kept for the next start: %s"


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
        return self.folder / f"{digest.hexdigest()}{SUFFIX}"

    def open(self, packing: WeightPacking, file: Path, *, least_bytes: int) -> None:
        """Let `packing` take what `file` holds, or else pack into what becomes it, if there is room
        for that. Never fails: the log says why not. A file that is refused is removed.
        `least_bytes`: that the packed weights will take."""
        if not self.limit_bytes:
            return
        try:
            if file.is_file():
                if (owner := foreign_owner(file)) is not None:
                    raise PackedFileError(f"{file} belongs to another user ({owner})")
                packing.open(file)
                with contextlib.suppress(OSError):  # a folder that may only be read
                    os.utime(file)  # used now: the last to go
                return
        except (PackedFileError, OSError) as error:
            logger.warning("the weights are packed anew: %s", error)
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        if least_bytes > self.limit_bytes:
            return  # `save` says it, when it knows how many there are
        try:
            self._make_room(least_bytes, but=file)
            packing.create(self.folder, self.limit_bytes)
        except OSError as error:
            logger.warning(_NOT_KEPT, error)

    def save(
        self, packing: WeightPacking, file: Path, weight_files: Iterable[Path]
    ) -> threading.Thread | None:
        """Keep what was packed anew, if there is room for it. Never fails: the log says why not.
        Returns the thread that waits for the disk; the process ends after it."""
        num_bytes = packing.num_bytes_to_save()
        if not self.limit_bytes or not num_bytes:
            return None
        if num_bytes > self.limit_bytes:
            logger.warning(
                "the packed weights are not kept for the next start: they take %d MiB, "
                "--weight-cache-size is %d MiB; set it to %d MiB or more",
                num_bytes >> 20,
                self.limit_bytes >> 20,
                -(-num_bytes >> 20),
            )
            return None
        try:
            self._make_room(num_bytes, but=file)
            put = packing.save(file, [str(each.resolve()) for each in weight_files])
        except OSError as error:
            logger.warning(_NOT_KEPT, error)
            return None
        thread = threading.Thread(target=self._put, args=(put, file), name="weight-cache")
        thread.start()
        return thread

    def _put(self, put: Callable[[], None], file: Path) -> None:
        started_s = time.monotonic()
        try:
            put()
            sizes = [each.stat().st_size for each in self.folder.glob(f"*{SUFFIX}")]
        except OSError as error:
            logger.warning(_NOT_KEPT, error)
            return
        logger.info(
            "kept packed weights for the next start in %.1f s: %s (%d files take %d MiB of "
            "--weight-cache-size %d MiB)",
            time.monotonic() - started_s,
            file,
            len(sizes),
            sum(sizes) >> 20,
            self.limit_bytes >> 20,
        )

    def _make_room(self, num_bytes: int, *, but: Path) -> None:
        """Remove files until `num_bytes` more fit, the least recently used first."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_abandoned(self.folder)
        kept = [file for file in self.folder.glob(f"*{SUFFIX}") if file != but]
        used = {file: file.stat() for file in kept}
        total_bytes = sum(status.st_size for status in used.values())
        for file in sorted(kept, key=lambda file: used[file].st_mtime_ns):
            if total_bytes + num_bytes <= self.limit_bytes:
                return
            file.unlink(missing_ok=True)
            total_bytes -= used[file].st_size
