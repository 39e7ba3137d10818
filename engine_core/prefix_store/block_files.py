"""A folder of blocks, a file each: complete or absent, checked when read, bounded in bytes."""

import contextlib
import hashlib
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from engine_core.kv_cache.host_pool import HashKey
from protocol.private_files import foreign_owner

KEY_BYTES = 16
"""Bytes of what tells one model and cache from another."""
_HASH_BYTES = 64
_CHECKSUM_BYTES = 32
_MAGIC = b"ecprefix"
_VERSION = 1
_HEADER = struct.Struct(f"<8sI{KEY_BYTES}sI{_HASH_BYTES}sQ")
_NAME = re.compile(
    rf"([0-9a-f]{{{2 * KEY_BYTES}}})-(\d{{1,4}})-([0-9a-f]{{{2 * _HASH_BYTES}}})\.kv"
)
_TEMPORARY = re.compile(rf"{_NAME.pattern}\.\d+\.tmp")
_ABANDONED_S = 60.0
"""Since the last change of a temporary file: its writer has died."""
_AGE_NS = 60 * 10**9
"""Uses within such a span count as one, in which the last blocks of prompts go first."""
_INDEX_NS = 10_000


class BrokenBlock(Exception):
    """A file does not hold what its name says; the text says what is wrong."""


class UnsafeFolder(Exception):
    """Others could put blocks into the folder, or there can be none; the text says why."""


class BlockFiles:
    """
        file     header | payload | checksum
        header   magic, version, key, group, hash, length
        name     KEY-GROUP-HASH.kv

    A file gets its name when it is complete, so several processes may share the folder. Its time
    of change is the time of its last use. Files of other names are left alone; blocks under another
    key are not read, but count and are evicted like all.

    Args:
        folder: made with mode 0700 if it is not there.
        limit_bytes: of all blocks together. Before each sixteenth that is written the least
            recently used ones are removed until an eighth is free, so that two processes may write.
        key: what blocks must agree in beside their hash.
        group_bytes: of a payload under that key, by group.

    Raises:
        UnsafeFolder: another user's, or writable by others.
        OSError: it cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        key: bytes,
        group_bytes: Sequence[int],
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.folder = folder
        self.block_bytes = max(group_bytes)
        """Bytes of the largest payload."""
        self._group_bytes = group_bytes
        self.file_bytes = _HEADER.size + self.block_bytes + _CHECKSUM_BYTES
        self.num_others = 0
        """At the last scan: files that are no blocks, and blocks under another key."""
        self._limit_bytes = limit_bytes
        self._key = key
        self._clock_ns = clock_ns
        self._num_written_bytes = 0
        """Bytes written since the last scan."""
        _make_private(folder)

    def path_of(self, block: HashKey) -> Path:
        """The path of the block, if it is there."""
        group, block_hash = block
        return self.folder / f"{self._key.hex()}-{group}-{block_hash.hex()}.kv"

    def scan(self) -> tuple[set[HashKey], set[HashKey]]:
        """Look through the folder by names and sizes, and evict what is too much.
        Returns blocks under our key that are there, and those of them that were evicted now."""
        self._num_written_bytes = self.num_others = total_bytes = 0
        found: list[tuple[int, int, Path, HashKey | None]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name = _NAME.fullmatch(entry.name)
                is_temporary = name is None and _TEMPORARY.fullmatch(entry.name)
                if name is None and not is_temporary:
                    self.num_others += 1
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not stat.S_ISREG(status.st_mode):
                    self.num_others += 1
                    continue
                block = None
                if name is not None and name[1] == self._key.hex():
                    block = (int(name[2]), bytes.fromhex(name[3]))
                self.num_others += block is None and not is_temporary
                age_s = (self._clock_ns() - status.st_mtime_ns) / 1e9
                is_broken = block is not None and status.st_size != self._file_bytes_of(block)
                if is_broken or (is_temporary and age_s > _ABANDONED_S):
                    _remove(Path(entry.path))
                    continue
                total_bytes += status.st_size
                found.append((status.st_mtime_ns, status.st_size, Path(entry.path), block))
        found.sort(key=lambda each: each[0])
        evicted, wanted_bytes = set(), self._limit_bytes - self._limit_bytes // 8
        for _, num_bytes, path, block in found:
            if total_bytes + self.file_bytes <= wanted_bytes:
                break
            _remove(path)
            total_bytes -= num_bytes
            if block is not None:
                evicted.add(block)
        return {block for *_, block in found if block is not None} - evicted, evicted

    def write(self, block: HashKey, index: int, payload: bytes) -> set[HashKey]:
        """Keep a block. Returns those that were evicted for it.
        `index`: its place in the prompt; of those used together the largest is evicted first.
        Raises OSError: the disk is full, for example. Nothing is left of the block then."""
        evicted: set[HashKey] = set()
        if self._num_written_bytes + self.file_bytes > self._limit_bytes // 16:
            _, evicted = self.scan()
        path = self.path_of(block)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        _remove(temporary)
        header = self._header(block)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with os.fdopen(os.open(temporary, flags, 0o600), "wb", buffering=0) as file:
                for part in (header, payload, _checksum(header, payload)):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
                self._set_time(file.fileno(), index)
            temporary.rename(path)
        except BaseException:
            _remove(temporary)
            raise
        self._num_written_bytes += self._file_bytes_of(block)
        return evicted - {block}

    def read(self, block: HashKey) -> bytes | None:
        """The payload; None if there is no such block.

        Raises:
            BrokenBlock: the file is not what was written.
            OSError: it cannot be read.
        """
        path = self.path_of(block)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            num_bytes = os.fstat(descriptor).st_size
            file_bytes = self._file_bytes_of(block)
            if num_bytes != file_bytes:
                raise BrokenBlock(f"{path} has {num_bytes} bytes, a block has {file_bytes}")
            header = file.read(_HEADER.size)
            payload = file.read(self._group_bytes[block[0]])
            checksum = file.read(_CHECKSUM_BYTES)
        if header != self._header(block):
            raise BrokenBlock(f"{path} is of another block")
        if checksum != _checksum(header, payload):
            raise BrokenBlock(f"{path} has a wrong checksum")
        return payload

    def touch(self, block: HashKey, index: int) -> None:
        """It is used now."""
        with contextlib.suppress(OSError):
            self._set_time(self.path_of(block), index)

    def delete(self, block: HashKey) -> None:
        """It is not wanted any more, if it is there."""
        _remove(self.path_of(block))

    def _header(self, block: HashKey) -> bytes:
        group, block_hash = block
        num_bytes = self._group_bytes[group]
        return _HEADER.pack(_MAGIC, _VERSION, self._key, group, block_hash, num_bytes)

    def _file_bytes_of(self, block: HashKey) -> int:
        """0 of a group that there is not."""
        group = block[0]
        if group >= len(self._group_bytes):
            return 0
        return self.file_bytes - self.block_bytes + self._group_bytes[group]

    def _set_time(self, file: int | Path, index: int) -> None:
        now_ns = self._clock_ns()
        used_ns = now_ns - now_ns % _AGE_NS + max(0, _AGE_NS - 1 - index * _INDEX_NS)
        os.utime(file, ns=(used_ns, used_ns))


def _checksum(header: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(header, digest_size=_CHECKSUM_BYTES)
    digest.update(payload)
    return digest.digest()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    owner = foreign_owner(folder, follows=False)  # of a link itself
    if owner is not None or status.st_uid != os.geteuid():
        owner = status.st_uid if owner is None else owner
        raise UnsafeFolder(f"{folder} belongs to user {owner}; name a folder of your own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        raise UnsafeFolder(f"others may write to {folder} (mode {mode:o}); chmod it to 700")
