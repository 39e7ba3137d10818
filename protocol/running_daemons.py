"""Which daemons of this user run: a file each, which its daemon keeps locked while it lives."""

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from protocol.addresses import default_socket_folder
from protocol.codec import understood
from protocol.errors import MalformedMessage
from protocol.private_files import create_private_file, make_private_folder, open_own_file

if sys.platform != "win32":
    import fcntl


class RunningDaemon(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        model: its name.
        asked: the model as it was asked for.
        files: the folder or file that it serves; empty until they are found.
        is_ready: it accepts requests; before, it may be fetching its model.
        started_s: since the epoch.
        keep_alive_s: how long a server that started it keeps it without requests; -1: for ever,
            None: it was not started by one.
    """

    pid: int
    model: str
    address: str
    files: str
    asked: str = ""
    is_ready: bool = True
    started_s: float = msgspec.field(default_factory=time.time)
    keep_alive_s: float | None = None


_MAX_BYTES = 1 << 16
_decoder = msgspec.json.Decoder(RunningDaemon)


@contextlib.contextmanager
def listed(daemon: RunningDaemon) -> Iterator[None]:
    """Inside, `running_daemons` knows it. Where there is no folder for that, nobody does."""
    with contextlib.ExitStack() as file:
        with contextlib.suppress(OSError):
            file.enter_context(_locked_file(daemon))
        yield


def running_daemons() -> list[RunningDaemon]:
    """Oldest first; on Windows there are none."""
    if sys.platform == "win32":
        return []
    found = []
    for path in _folder().glob("*.json"):
        with contextlib.suppress(OSError, MalformedMessage), open_own_file(path) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(_daemon_in(stream))
            else:
                path.unlink()  # of a daemon that was killed
    return sorted(found, key=lambda each: each.started_s)


def note_daemon(pid: int, **changes: Any) -> None:
    """For `running_daemons`: other values of this daemon's fields. Where it has no file, none."""
    with (
        contextlib.suppress(OSError, MalformedMessage),
        open_own_file(_file(pid), writes=True) as stream,
    ):
        text = msgspec.json.encode(msgspec.structs.replace(_daemon_in(stream), **changes))
        os.pwrite(stream.fileno(), text, 0)
        stream.truncate(len(text))


@contextlib.contextmanager
def _locked_file(daemon: RunningDaemon) -> Iterator[None]:
    path = _file(daemon.pid)
    for folder in (path.parent.parent, path.parent):
        make_private_folder(folder)
    unfinished = path.with_suffix(".new")
    with create_private_file(unfinished) as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.write(msgspec.json.encode(daemon))
        stream.flush()
        unfinished.rename(path)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _daemon_in(stream: BinaryIO) -> RunningDaemon:
    return understood(_decoder.decode, stream.read(_MAX_BYTES), "a RunningDaemon")


def _folder() -> Path:
    return default_socket_folder() / "daemons"


def _file(pid: int) -> Path:
    return _folder() / f"{pid}.json"
