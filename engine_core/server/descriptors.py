"""Descriptors: each connection takes one. libzmq ends the process where a Unix socket's `accept`
finds none free, so that socket is hidden before it comes to that."""

import contextlib
import logging
import os
import resource
import threading
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_core.errors import StartupError

logger = logging.getLogger(__name__)

_OWN = 128
"""Sockets, files and libraries of the daemon itself."""
LATE = 192
"""Connections that are still accepted when the socket is hidden: the kernel's queue (100), and
those that come before a thread notices."""
_POLL_MS = 100
_IF_INFINITE = 10_240


def limit_clients(asked: int) -> int:
    """Raise this process's soft limit of descriptors to the hard one. Returns how many clients have
    room under it, at most `asked`. Raises StartupError: none has."""
    soft, asked_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS says "infinite" and takes no soft limit above this
    hard = max(soft, _IF_INFINITE) if asked_hard == resource.RLIM_INFINITY else asked_hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, asked_hard))
    room = hard - _OWN - LATE
    if room < 1:
        raise StartupError(
            f"this process may open {hard} files, it needs {_OWN + LATE} and one for each client; "
            "raise the limit (ulimit -Hn, or LimitNOFILE= of a systemd unit)"
        )
    if room < asked:
        logger.warning(
            "--max-clients is lowered from %d to %d: this process may open %d files",
            asked,
            room,
            hard,
        )
    return min(asked, room)


class SocketGuard:
    """Renames a Unix socket while few descriptors are free: those that are connected stay, others
    find no socket. `monitor`: tells of accepted connections, by descriptor: the system gives the
    lowest free one."""

    def __init__(self, path: Path, monitor: zmq.Socket[bytes]) -> None:
        self._path = path
        self._hidden_path = path.with_name(path.name + ".full")
        self._monitor = monitor
        self._is_hidden = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._monitor.close(linger=0)
        if self._is_hidden:
            self._show()

    def _watch(self) -> None:
        with contextlib.suppress(zmq.ZMQError):  # an interrupted start has closed the sockets
            self._watch_monitor()

    def _watch_monitor(self) -> None:
        while not self._is_closed.is_set():
            if self._monitor.poll(_POLL_MS):
                number = int(recv_monitor_message(self._monitor)["value"])
                if not self._is_hidden and number >= _most_descriptors() - LATE:
                    self._hide(number)
            elif self._is_hidden and lowest_free() < _most_descriptors() - LATE - 1:
                self._show()

    def _hide(self, number: int) -> None:
        self._is_hidden = True
        with contextlib.suppress(FileNotFoundError):  # somebody removed it
            self._path.rename(self._hidden_path)
        logger.warning(
            "%d descriptors are in use, the limit is %d: nobody can connect until some are free; "
            "end processes that connect without need, or raise the limit (ulimit -Hn)",
            number,
            _most_descriptors(),
        )

    def _show(self) -> None:
        self._is_hidden = False
        with contextlib.suppress(FileNotFoundError):
            self._hidden_path.rename(self._path)
        logger.info("descriptors are free again: clients can connect")


def _most_descriptors() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def lowest_free() -> int:
    try:
        descriptor = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # there is none
        return _most_descriptors()
    os.close(descriptor)
    return descriptor
