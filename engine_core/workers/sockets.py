"""The sockets at which rank 0 meets its workers, and what tells it that a connection was lost."""

import contextlib
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_core.errors import ConfigurationError
from engine_core.server.authentication import KeyCheck
from engine_core.server.keys import KeyFolder
from engine_core.workers.meeting import HEARTBEAT_MS, SILENCE_MS

_LOOK_S = 5.0


class WorkerSockets:
    """ROUTER sockets, each with a monitor of connections that end. Close it after use."""

    def __init__(self) -> None:
        self._resources = contextlib.ExitStack()
        self._context = self._resources.enter_context(zmq.Context())
        self._poller = zmq.Poller()
        self._keys: KeyFolder | None = None
        self._key_check: KeyCheck | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._monitors: list[zmq.Socket[bytes]] = []
        self._look_until_s = 0.0

    def bind(self, address: str, keys: KeyFolder | None = None) -> str:
        """Returns the address with its port. `keys`: of those that may join there.
        Raises ConfigurationError."""
        socket = self._resources.enter_context(self._context.socket(zmq.ROUTER))
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.LINGER, 1_000)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if "[" in address:
            socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            self._keys, self._key_check = keys, KeyCheck(self._context, socket, keys)
            self._resources.enter_context(self._key_check.socket)
            self._poller.register(self._key_check.socket, zmq.POLLIN)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._resources.callback(socket.disable_monitor)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigurationError(
                f"workers cannot be reached at {address}: {error}; choose another --workers-bind, "
                "or a shorter XDG_RUNTIME_DIR"
            ) from None
        for each in (socket, monitor):
            self._poller.register(each, zmq.POLLIN)
        self._sockets.append(socket)
        self._monitors.append(monitor)
        return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def wakes(self) -> "list[zmq.Socket[bytes]]":
        """Readable when a worker is lost, or says something."""
        return [*self._sockets, *self._monitors]

    @property
    def last_bound(self) -> "zmq.Socket[bytes]":
        """The socket of the address that was bound last."""
        return self._sockets[-1]

    @property
    def is_one_lost(self) -> bool:
        """Whether a connection was lost a moment ago, of whichever worker."""
        return time.monotonic() < self._look_until_s

    def lacks_admins_key(self, frame: zmq.Frame) -> bool:
        """Whether a message came over a socket with keys, by a key that is no admin's."""
        if self._keys is None:
            return False
        key = self._keys.authorized().get(str(frame.get("User-Id")))
        return key is None or not key.is_admin

    def wait(self, timeout_s: float) -> bool:
        """Whether there is something to receive, after at most so many seconds."""
        if self._key_check is not None:
            self._key_check.answer_all()
        return bool(self._poller.poll(round(timeout_s * 1e3)))

    def receive(self) -> "Iterator[tuple[zmq.Socket[bytes], bytes, zmq.Frame]]":
        """What has come: the socket, the sender's identity, the message."""
        for socket in self._sockets:
            with contextlib.suppress(zmq.Again):
                while True:
                    parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    yield socket, parts[0].bytes, parts[-1]
        for monitor in self._monitors:
            with contextlib.suppress(zmq.Again):
                while True:
                    recv_monitor_message(monitor, zmq.NOBLOCK)
                    # the socket learns later than its monitor whose connection that was
                    self._look_until_s = time.monotonic() + _LOOK_S

    def close(self) -> None:
        """Calling it again does nothing."""
        self._resources.close()
