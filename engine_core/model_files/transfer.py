"""Files over HTTP: resumed where an earlier try ended, and checked before they have their name."""

import errno
import fcntl
import functools
import hashlib
import io
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
    num_bytes: int | None
    sha256: str | None
    headers: dict[str, str]


def fetch_files(
    files: Iterable[RemoteFile], *, report: Callable[[str], None], progress: Progress | None
) -> None:
    """All of them, some at once. `progress` gets the digest of the first one.
    Raises DownloadFailed: what came is not the file; OSError with ENOSPC: there is no room, and
    nothing was fetched; exceptions of huggingface_hub and its HTTP client."""
    from huggingface_hub.utils import disable_progress_bars

    if progress is not None:
        disable_progress_bars()
    if not (files := list(files)):
        return
    needed_bytes = total = sum(file.num_bytes or 0 for file in files)
    for file in files:
        file.target.parent.mkdir(parents=True, exist_ok=True)
        if file.partial.exists():
            needed_bytes -= file.partial.stat().st_size
    free_bytes = shutil.disk_usage(files[0].target.parent).free
    if free_bytes < needed_bytes:
        room = f"{needed_bytes / 1e6:,.0f} MB are needed, {free_bytes / 1e6:,.0f} MB are free"
        raise OSError(errno.ENOSPC, room)
    digest = f"sha256:{files[0].sha256}" if files[0].sha256 else ""
    here_bytes: dict[Path, int] = {}
    lock, has_ended = threading.Lock(), threading.Event()

    def fetch(file: RemoteFile) -> None:
        def put(num_bytes: int) -> None:
            if has_ended.is_set():
                raise DownloadFailed("the download was interrupted")
            with lock:
                here_bytes[file.target] = num_bytes
                if progress is not None:
                    done = sum(here_bytes.values())
                    progress(done, max(done, total), digest)

        _fetch(file, put, report)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        try:  # one file is fetched by this thread: Ctrl-C ends it at once
            for _ in (map if len(files) == 1 else pool.map)(fetch, files):
                pass
        finally:
            has_ended.set()  # interrupted, or one of them failed: the others end, too


def patiently(call: Callable[[], T], report: Callable[[str], None]) -> T:
    """What `call` gives; again a few times while the server is busy, which may say for how long."""
    from huggingface_hub.errors import HfHubHTTPError

    for wait_s in _WAITS_S:
        try:
            return call()
        except Exception as error:
            refusal = error.__cause__ if isinstance(error.__cause__, HfHubHTTPError) else error
            response = getattr(refusal, "response", None)
            if response is None or response.status_code not in _BUSY:
                raise
            said = response.headers.get("retry-after", "")
            wait_s = min(float(said) if said.isdecimal() else wait_s, _LONGEST_WAIT_S)
            report(f"the server is busy ({response.status_code}); next try in {wait_s:g} s")
            time.sleep(wait_s)
    return call()


def sha256_of(path: Path) -> str:
    """Hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class _Watched(io.BufferedWriter):
    """A file that tells how long it is when something was written."""

    put: Callable[[int], None]

    def write(self, data: Any) -> int:
        num_bytes = super().write(data)
        self.put(self.tell())
        return num_bytes


def _fetch(file: RemoteFile, put: Callable[[int], None], report: Callable[[str], None]) -> None:
    with _Watched(io.FileIO(file.partial, "ab")) as stream:
        stream.put = put
        fcntl.flock(stream, fcntl.LOCK_EX)  # of other processes that fetch it
        if file.target.exists():
            file.partial.unlink(missing_ok=True)
            return
        patiently(functools.partial(_transfer, file, stream), report)
        stream.flush()
        if file.sha256 is not None:
            report("verifying sha256 digest")
            digest = sha256_of(file.partial)
            if digest != file.sha256:
                num_bytes = stream.tell()
                stream.truncate(0)
                raise DownloadFailed(
                    f"{file.url} is not the expected file: {num_bytes} bytes with SHA-256 "
                    f"{digest}, expected {file.sha256}; it was deleted, try again"
                )
        file.partial.replace(file.target)


def _transfer(file: RemoteFile, stream: _Watched) -> None:
    from huggingface_hub.file_download import http_get

    here_bytes = stream.seek(0, io.SEEK_END)
    if file.num_bytes is None or here_bytes > file.num_bytes:
        here_bytes = stream.truncate(stream.seek(0))
    stream.put(here_bytes)
    http_get(
        file.url,
        stream,
        resume_size=here_bytes,
        headers=file.headers,
        expected_size=file.num_bytes,
        displayed_filename=file.target.name,
    )
