"""Responses that were asked to be kept: in bounded memory, or in a bounded folder."""

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import IO

import msgspec

from frontend.errors import InvalidInput
from protocol.private_files import create_private_file, make_private_folder, open_own_file

logger = logging.getLogger(__name__)

_RESPONSE_OF_ITEM = re.compile(r"[a-z]+_([0-9a-f]{48})")
_ID = re.compile(r"resp_[0-9a-f]{48}")
_ON_DISK = 16_384, 2**30
"""Most responses and bytes of a folder."""
_ANY = "any"


class StoredResponse(msgspec.Struct, frozen=True, array_like=True):
    """
    Args:
        response: the JSON document.
        items: JSON of the whole conversation, with what was answered.
        num_before: items of responses before this one.
        events: of its stream, if they can be asked for again.
    """

    response: bytes
    items: bytes
    num_before: int = 0
    events: list[bytes] | None = None


class ResponseStore:
    """Beyond its bounds, which all owners share, it drops what was not used for longest by the
    owner who has the most.

    Args:
        folder: kept there, also when this process ends; default: in memory.

    Raises:
        InvalidInput: the folder cannot be used.
    """

    def __init__(
        self,
        max_responses: int | None = None,
        max_bytes: int | None = None,
        folder: Path | None = None,
    ) -> None:
        most, most_bytes = (1024, 64 * 1024**2) if folder is None else _ON_DISK
        self._max_responses = most if max_responses is None else max_responses
        self._max_bytes = most_bytes if max_bytes is None else max_bytes
        self._folder = folder
        self._lock: IO[str] | None = None
        self._in_memory: dict[str, bytes] = {}
        self._sizes: dict[str, OrderedDict[str, int]] = {}
        """Bytes of each response of an owner, the least recently used first."""
        self._num_bytes: Counter[str] = Counter()
        if folder is not None:
            try:
                self._find_files(folder)
            except BlockingIOError:
                what = f"--responses-dir {folder}: another server uses it; give another folder"
                raise InvalidInput(what) from None
            except OSError as error:
                raise InvalidInput(f"--responses-dir {folder} cannot be used: {error}") from None

    def close(self) -> None:
        """Another one may use the folder now."""
        if self._lock is not None:
            self._lock.close()

    async def put(self, response_id: str, owner: str | None, stored: StoredResponse) -> None:
        """One that is larger than all of the space is not kept, or that cannot be written."""
        data, key = msgspec.msgpack.encode(stored), _key(owner)
        if len(data) > self._max_bytes:
            return
        if self._folder is None:
            self._in_memory[response_id] = data
        else:
            try:
                await asyncio.to_thread(_write, self._path(key, response_id), data)
            except OSError as error:
                logger.warning("a response is not kept: %s", error)
                return
        self._count(key, response_id, len(data))
        for owner_key, dropped in self._beyond():
            await self._remove(owner_key, dropped)

    async def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """None: it is not there, or belongs to another one."""
        key = _key(owner)
        if response_id not in (own := self._sizes.get(key, OrderedDict())):
            return None
        own.move_to_end(response_id)
        if self._folder is None:
            data = self._in_memory[response_id]
        else:
            data = await asyncio.to_thread(_read, self._path(key, response_id))
        try:
            return msgspec.msgpack.decode(data, type=StoredResponse)
        except msgspec.MsgspecError:  # the file is gone, or damaged
            return None

    async def item(self, item_id: str, owner: str | None) -> bytes | None:
        """JSON of the item of a response; None: it is not there."""
        found = _RESPONSE_OF_ITEM.match(item_id)
        stored = None if found is None else await self.get(f"resp_{found[1]}", owner)
        items = [] if stored is None else msgspec.json.decode(stored.items, type=list[msgspec.Raw])
        given = (each for each in items if msgspec.json.decode(each).get("id") == item_id)
        return next(map(bytes, given), None)

    async def delete(self, response_id: str, owner: str | None) -> bool:
        """Whether it was there."""
        key = _key(owner)
        if (size := self._sizes.get(key, OrderedDict()).pop(response_id, None)) is None:
            return False
        self._num_bytes[key] -= size
        await self._remove(key, response_id)
        return True

    def _count(self, key: str, response_id: str, size: int) -> None:
        own = self._sizes.setdefault(key, OrderedDict())
        self._num_bytes[key] += size - own.pop(response_id, 0)
        own[response_id] = size

    def _beyond(self) -> list[tuple[str, str]]:
        """Owners and ids of what has no place any more; it is not counted."""
        found = []
        while self._num_bytes.total() > self._max_bytes:
            found.append(self._drop_one(max(self._sizes, key=self._num_bytes.__getitem__)))
        while sum(map(len, self._sizes.values())) > self._max_responses:
            found.append(self._drop_one(max(self._sizes, key=lambda key: len(self._sizes[key]))))
        return found

    def _drop_one(self, key: str) -> tuple[str, str]:
        response_id, size = self._sizes[key].popitem(last=False)
        self._num_bytes[key] -= size
        return key, response_id

    async def _remove(self, key: str, response_id: str) -> None:
        self._in_memory.pop(response_id, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._path(key, response_id).unlink)

    def _path(self, key: str, response_id: str) -> Path:
        assert self._folder is not None
        return self._folder / key / response_id

    def _find_files(self, folder: Path) -> None:
        """Counts what an earlier process has left, by the times of its last use."""
        make_private_folder(folder)
        self._lock = (folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process
        found = []
        for path in folder.glob("*/resp_*"):
            if _ID.fullmatch(path.name):
                status = path.stat()
                found.append((status.st_mtime, path.parent.name, path.name, status.st_size))
            elif path.suffix == ".part":
                path.unlink()  # torn off by the end of a process
        for _, key, response_id, size in sorted(found):
            self._count(key, response_id, size)
        for key, response_id in self._beyond():
            self._path(key, response_id).unlink()


def _key(owner: str | None) -> str:
    """The name of an owner's folder."""
    return _ANY if owner is None else hashlib.sha256(owner.encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    """All of it, or nothing."""
    make_private_folder(path.parent)
    part = path.with_suffix(".part")
    with create_private_file(part) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _read(path: Path) -> bytes:
    """Nothing if it is not there. The file's time is that of its last use."""
    with contextlib.suppress(OSError), open_own_file(path) as file:
        os.utime(path)
        return file.read()
    return b""
