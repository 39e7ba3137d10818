"""Files over HTTP: resumed where an earlier try ended, and checked before they have their name."""

import contextlib
import errno
import functools
import hashlib
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine_core.model_files.download import Progress
from engine_core.model_files.errors import DownloadFailed

T = TypeVar("T")

_AT_ONCE = 4
_BUSY = (429, 500, 502, 503, 504)
_WAITS_S = (1.0, 2.0, 4.0)
_LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file at `url` that becomes `target`; what is there of it so far is `partial`, which no
    other content may have as its name. None: not known, so nothing is resumed, or not checked."""

    url: str
    target: Path
    partial: Path
    lock: Path
    num_bytes: int | None
    sha256: str | None
    headers: dict[str, str]

    @property
    def here_bytes(self) -> int:
        for path in (self.target, self.partial):
            with contextlib.suppress(OSError):
                return path.stat().st_size
        return 0


def fetch_files(
    files: Iterable[RemoteFile], *, report: Callable[[str], None], progress: Progress | None
) -> None:
    """All of them, some at once.

    Raises:
        DownloadFailed: what came is not the file.
        OSError: with ENOSPC if there is no room, before anything is fetched.
        Exception: those of huggingface_hub and its HTTP client.
    """
    files = list(files)
    if not files:
        return
    for file in files:
        for folder in (file.target.parent, file.partial.parent, file.lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
    needed_bytes = sum((file.num_bytes or 0) - file.here_bytes for file in files)
    free_bytes = shutil.disk_usage(files[0].partial.parent).free
    if free_bytes < needed_bytes:
        room = f"{needed_bytes / 1e6:,.0f} MB are needed, {free_bytes / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, room)
    largest = max(files, key=lambda file: file.num_bytes or 0)
    digest = f"sha256:{largest.sha256}" if largest.sha256 else ""
    arrivals = _Arrivals(sum(file.num_bytes or 0 for file in files), digest, progress)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        one_by_one = map if len(files) == 1 else pool.map  # Ctrl-C ends this thread at once
        try:
            for _ in one_by_one(lambda file: _fetch(file, arrivals, report), files):
                pass
        finally:
            arrivals.wanted = False  # interrupted, or one of them failed: the others end, too


def patiently(call: Callable[[], T], report: Callable[[str], None]) -> T:
    """What `call` gives; again a few times while the server is busy, which may say for how long."""
    from huggingface_hub.errors import HfHubHTTPError

    for wait_s in _WAITS_S:
        try:
            return call()
        except Exception as error:
            refusal = next(
                (e for e in (error, error.__cause__) if isinstance(e, HfHubHTTPError)), None
            )
            if refusal is None or refusal.response.status_code not in _BUSY:
                raise
            said = refusal.response.headers.get("retry-after", "")
            wait_s = min(float(said) if said.isdecimal() else wait_s, _LONGEST_WAIT_S)
            report(f"the server is busy ({refusal.response.status_code}); next try in {wait_s:g} s")
            time.sleep(wait_s)
    return call()


class _Arrivals:
    """Bytes that are there, of each file."""

    def __init__(self, total: int, digest: str, progress: Progress | None) -> None:
        self.wanted = True
        self.progress = progress
        self._total, self._digest = total, digest
        self._done: dict[Path, int] = {}
        self._lock = threading.Lock()

    def put(self, file: RemoteFile, num_bytes: int) -> None:
        """Raises DownloadFailed: no more are wanted."""
        if not self.wanted:
            raise DownloadFailed("the download was interrupted")
        with self._lock:
            self._done[file.target] = num_bytes
            if self.progress is not None:
                done = sum(self._done.values())
                self.progress(done, max(done, self._total), self._digest)


def progress_bars(put: Callable[[int], None], *, hidden: bool) -> type:
    """A class of progress bars for huggingface_hub; `put` is told of the bytes that are there."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **(more | {"disable": True} if hidden else more))
            self._here_bytes = 0
            self.update_bytes(more.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            self.update_bytes(n or 0)

        def update_bytes(self, n: float) -> None:
            self._here_bytes += int(n)
            put(self._here_bytes)

    return Bar


def _fetch(file: RemoteFile, arrivals: _Arrivals, report: Callable[[str], None]) -> None:
    from huggingface_hub.utils import WeakFileLock

    with WeakFileLock(file.lock):
        if not file.target.exists():
            patiently(lambda: _transfer(file, arrivals), report)
            if file.sha256 is not None:
                report("verifying sha256 digest")
                _check(file, file.sha256)
            file.partial.replace(file.target)
    arrivals.put(file, file.here_bytes)


def _transfer(file: RemoteFile, arrivals: _Arrivals) -> None:
    from huggingface_hub.file_download import http_get

    here_bytes = file.here_bytes
    if file.num_bytes is None or here_bytes > file.num_bytes:
        file.partial.unlink(missing_ok=True)
        here_bytes = 0
    with file.partial.open("ab") as stream:
        http_get(
            file.url,
            stream,
            resume_size=here_bytes,
            headers=file.headers,
            expected_size=file.num_bytes,
            displayed_filename=file.target.name,
            tqdm_class=progress_bars(
                functools.partial(arrivals.put, file), hidden=arrivals.progress is not None
            ),
        )


def sha256_of(path: Path) -> str:
    """Hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check(file: RemoteFile, expected: str) -> None:
    digest = sha256_of(file.partial)
    if digest != expected:
        num_bytes = file.partial.stat().st_size
        file.partial.unlink()
        raise DownloadFailed(
            f"{file.url} is not the expected file: {num_bytes} bytes with SHA-256 {digest}, "
            f"expected {expected}; it was deleted, try again"
        )
