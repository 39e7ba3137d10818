"""Answers on disk, each once, whatever ends the process that writes them."""

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import msgspec

from frontend.batch.lines import BatchInput
from frontend.errors import InvalidInput
from protocol.private_files import make_private_folder

_PART_ROWS = 1000
_FORMAT = 1


class Part(msgspec.Struct, frozen=True):
    name: str
    num_rows: int
    sha256: str


class Manifest(msgspec.Struct):
    """Whose answers the folder holds, and its parts that never change again."""

    format: int
    input: str
    input_sha256: str
    model: str
    parts: list[Part]


class _Named(msgspec.Struct):
    custom_id: str


class AnswerFile:
    """
    ```
    OUT.parts/manifest.json      written anew with each part, by a rename
    OUT.parts/part-00000.jsonl   1,000 answers; has its name once it is whole and on disk
    OUT.parts/open.jsonl         one more line an answer; a torn last line is cut off at a resume
    OUT                          all answers in the input's order, by a rename; then no more parts
    ```
    One process at a time holds the folder; the system's lock ends with it.

    Args:
        path: OUT.
        model: answers of two models are not mixed.
        part_rows: answers a part.

    Raises:
        InvalidInput: OUT or its parts are of another input or model, damaged, or in use.
    """

    def __init__(
        self, path: Path, source: BatchInput, model: str, *, part_rows: int = _PART_ROWS
    ) -> None:
        self._path, self._source, self._part_rows = path, source, part_rows
        self._folder = path.with_name(path.name + ".parts")
        self._places: dict[str, tuple[int, int, int]] = {}
        """Of each answer: the number of its part, and where its line begins and ends there."""
        self.is_complete = path.exists()
        self._stack = contextlib.ExitStack()
        if self.is_complete:
            self._check_answers()
            shutil.rmtree(self._folder, ignore_errors=True)  # the end was cut short
            return
        make_private_folder(self._folder)  # it holds answers, and names that are known
        try:
            self._lock()
            self._manifest = self._read_manifest(model)
            self._resume()
        except BaseException:
            self._stack.close()
            raise

    @property
    def num_lines(self) -> int:
        """How many there are to answer."""
        return len(self._source.lines)

    @property
    def num_answered(self) -> int:
        return len(self._source.lines) if self.is_complete else len(self._places)

    def lines(self) -> Iterator[bytes]:
        """Answers so far, before `finish`, in the input's order."""
        with contextlib.ExitStack() as stack:
            names = [*(part.name for part in self._manifest.parts), "open.jsonl"]
            files = [stack.enter_context((self._folder / name).open("rb")) for name in names]
            for custom_id in self._source.lines:
                if custom_id in self._places:
                    part, start, stop = self._places[custom_id]
                    files[part].seek(start)
                    yield files[part].read(stop - start)

    def unanswered(self) -> Iterator[tuple[int, bytes]]:
        """Numbers and lines of the input."""
        for custom_id, numbered in self._source.lines.items():
            if custom_id not in self._places:
                yield numbered

    def add(self, custom_id: str, line: bytes) -> bool:
        """Keep an answer. False if there is one already: then that one stays."""
        if custom_id in self._places:
            return False
        assert custom_id in self._source.lines, f"{custom_id} was not asked"
        start = self._open.tell()
        self._open.write(line)
        self._open.flush()  # to the system: this process may be killed
        self._places[custom_id] = len(self._manifest.parts), start, start + len(line)
        self._num_open += 1
        if self._num_open >= self._part_rows:
            self._close_part()
        return True

    def finish(self) -> None:
        """All answers to OUT, in the input's order."""
        assert len(self._places) == len(self._source.lines), "not all are answered"
        os.fsync(self._open.fileno())
        whole = self._folder / "answers.jsonl"
        with whole.open("wb") as out:
            out.writelines(self.lines())
            out.flush()
            os.fsync(out.fileno())
        whole.replace(self._path)
        _sync_folder(self._path.parent)
        self.is_complete = True
        self.remove()

    def remove(self) -> None:
        """Close it, and remove its parts."""
        self.close()
        shutil.rmtree(self._folder)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ------------------------------------------------------------------ parts of these

    def _lock(self) -> None:
        lock = self._stack.enter_context((self._folder / "lock").open("w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InvalidInput(
                f"another process writes {self._path}; wait for its end, or give another name"
            ) from None

    def _read_manifest(self, model: str) -> Manifest:
        ours = Manifest(_FORMAT, self._source.name, self._source.sha256, model, [])
        try:
            data = (self._folder / "manifest.json").read_bytes()
        except FileNotFoundError:
            self._write_manifest(ours)
            return ours
        try:
            found = msgspec.json.decode(data, type=Manifest)
        except msgspec.DecodeError as error:
            raise self._other(f"has a manifest that cannot be read: {error}") from None
        for what, there, here in (
            ("the format", found.format, ours.format),
            (
                "the input",
                f"{found.input} {found.input_sha256}",
                f"{ours.input} {ours.input_sha256}",
            ),
            ("the model", found.model, ours.model),
        ):
            if there != here:
                raise self._other(f"is of another run: {what} was {there}, and is {here} now")
        return found

    def _resume(self) -> None:
        for number, part in enumerate(self._manifest.parts):
            path = self._folder / part.name
            data = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(data).hexdigest() != part.sha256:
                raise self._other(f"is damaged: {part.name} is not what was written")
            self._take(number, data)
        path = self._next_part
        if path.exists():  # whole, but the manifest was not written any more
            self._note_part(path, self._take(len(self._manifest.parts), path.read_bytes()))
        path = self._folder / "open.jsonl"
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        self._open_part(len(whole))
        self._num_open = self._take(len(self._manifest.parts), whole)

    @property
    def _next_part(self) -> Path:
        return self._folder / f"part-{len(self._manifest.parts):05d}.jsonl"

    def _take(self, part: int, data: bytes) -> int:
        """Note each answer of a part. Returns how many lines it has."""
        start = num_rows = 0
        for line in data.splitlines(keepends=True):
            custom_id = msgspec.json.decode(line, type=_Named).custom_id
            self._places[custom_id] = part, start, start + len(line)
            start += len(line)
            num_rows += 1
        return num_rows

    def _open_part(self, size: int) -> None:
        self._open = self._stack.enter_context((self._folder / "open.jsonl").open("ab"))
        self._open.truncate(size)
        self._open.seek(size)
        self._num_open = 0

    def _close_part(self) -> None:
        os.fsync(self._open.fileno())
        self._open.close()
        path = self._next_part
        Path(self._open.name).replace(path)
        _sync_folder(self._folder)
        self._note_part(path, self._num_open)
        self._open_part(0)

    def _note_part(self, path: Path, num_rows: int) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        self._manifest.parts.append(Part(path.name, num_rows, digest))
        self._write_manifest(self._manifest)

    def _write_manifest(self, manifest: Manifest) -> None:
        write_whole(self._folder / "manifest.json", msgspec.json.encode(manifest))

    def _check_answers(self) -> None:
        try:
            found = [
                msgspec.json.decode(line, type=_Named).custom_id
                for line in self._path.read_bytes().splitlines()
            ]
        except msgspec.DecodeError:
            found = []
        if found != list(self._source.lines):
            raise InvalidInput(
                f"{self._path} is there, and not the answers to {self._source.name}; move it, or "
                "give another name"
            )

    def _other(self, why: str) -> InvalidInput:
        return InvalidInput(
            f"{self._folder} {why}; go on with what it was begun with, or remove the folder"
        )


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by a rename, on disk when this returns."""
    with path.with_suffix(".new").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".new").replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Sync the folder, so that a rename outlives the machine's end, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
