"""Files of a server's callers, on disk: what they upload, and what their batches give."""

import contextlib
import fcntl
import functools
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec

from frontend.batch.answer_file import write_whole
from frontend.errors import InvalidInput
from protocol.private_files import make_private_folder

T = TypeVar("T", bound=msgspec.Struct)

_ID = re.compile(r"(file-|batch_)[0-9a-f]{24}[a-z]?")
_MOST_FILES = 10_000
"""Most of all owners."""


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file as OpenAI describes it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileStore:
    """
    ```
    ROOT/lock                    of the one server that uses it
    ROOT/of-OWNER/file-ID        a file
    ROOT/of-OWNER/file-ID.json   its FileObject; the file is there once this is
    ROOT/of-OWNER/batch_ID.json  a batch
    ```
    What callers name ids by is looked at before it becomes a path.

    Args:
        root: None: a private temporary folder, made when it is needed, which `close` removes.
        max_bytes: of all files; beyond them none is taken, but what running batches give.

    Raises:
        InvalidInput: the folder cannot be used, or another server uses it.
    """

    def __init__(self, root: Path | None, max_bytes: int) -> None:
        self._given = root
        self.max_bytes = max_bytes
        self._stack = contextlib.ExitStack()
        if root is None:
            return
        try:
            make_private_folder(root)
            lock = self._stack.enter_context((root / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._stack.close()
            raise InvalidInput(
                f"--files-dir {root} cannot be used, or another server does: {error}; give "
                "another folder"
            ) from None

    @functools.cached_property
    def _root(self) -> Path:
        if self._given is not None:
            return self._given
        return Path(
            self._stack.enter_context(tempfile.TemporaryDirectory("", "engine-core-files-"))
        )

    def close(self) -> None:
        self._stack.close()

    def path(self, owner: str | None, name: str) -> Path:
        """The file of this id, there or not. `owner`: None: a server without keys has one.
        Raises KeyError: no id."""
        if not _ID.fullmatch(name):
            raise KeyError(name)
        return self._root / ("all" if owner is None else f"of-{owner}") / name

    def save(self, owner: str | None, name: str, record: msgspec.Struct) -> None:
        path = self.path(owner, name)
        make_private_folder(path.parent)
        write_whole(path.with_suffix(".json"), msgspec.json.encode(record))

    def load(self, owner: str | None, name: str, kind: type[T]) -> T:
        """Raises KeyError: the owner has none of this name."""
        path = self.path(owner, name).with_suffix(".json")
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (FileNotFoundError, msgspec.ValidationError):  # it may be of another kind
            raise KeyError(name) from None

    def all_of(self, owner: str | None, prefix: str, kind: type[T]) -> list[T]:
        """The owner's records whose ids begin so, in no order."""
        folder = self.path(owner, "file-" + "0" * 24).parent
        return [self.load(owner, each.stem, kind) for each in folder.glob(f"{prefix}*.json")]

    def everyones(self, prefix: str, kind: type[T]) -> Iterator[T]:
        """Records of all owners."""
        for path in self._root.glob(f"*/{prefix}*.json"):
            with contextlib.suppress(FileNotFoundError):
                yield msgspec.json.decode(path.read_bytes(), type=kind)

    def add(
        self, owner: str | None, name: str, purpose: str, data: BinaryIO, file_id: str = ""
    ) -> FileObject:
        """Keep a file. `file_id`: of what a batch gives, which may be there already.
        Raises InvalidInput: see `check_room`."""
        path = self.path(owner, file_id or new_id("file-"))
        make_private_folder(path.parent)
        if not file_id:
            size = data.seek(0, 2)
            data.seek(0)
            self.check_room(size)
        with path.open("wb") as file:
            shutil.copyfileobj(data, file)
        made = FileObject(
            id=path.name,
            bytes=path.stat().st_size,
            created_at=int(time.time()),
            filename=name,
            purpose=purpose,
        )
        self.save(owner, path.name, made)
        return made

    def check_room(self, num_bytes: int = 1) -> None:
        """Raises InvalidInput: there is no room for a file of so many bytes."""
        sizes = [each.bytes for each in self.everyones("file-", FileObject)]
        if sum(sizes) + num_bytes > self.max_bytes or len(sizes) >= _MOST_FILES:
            raise InvalidInput(
                f"{len(sizes)} files here have {sum(sizes)} bytes, {num_bytes} are to come; the "
                f"limit is {self.max_bytes} in {_MOST_FILES} files; delete some, or raise "
                "--max-files-size"
            )

    def forget_oldest(self, prefix: str, most: int, kept: Collection[str]) -> None:
        """Drop records whose ids begin so beyond `most`, but not those of these ids."""
        paths = sorted(self._root.glob(f"*/{prefix}*.json"), key=lambda path: path.stat().st_mtime)
        for path in paths[: max(0, len(paths) - most)]:
            if path.stem not in kept:
                path.unlink()

    def delete(self, owner: str | None, file_id: str) -> None:
        """Raises KeyError: there is none."""
        self.load(owner, file_id, FileObject)
        path = self.path(owner, file_id)
        path.with_suffix(".json").unlink()  # first: half a file is no file
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
