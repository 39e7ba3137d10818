"""How frames reach clients: the interface, and a ZMQ ROUTER socket with its address, lock and
permissions."""

import contextlib
import fcntl
import functools
import ipaddress
import logging
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import zmq

from engine_core.errors import AddressInUse, ConfigurationError
from engine_core.server.descriptors import SocketGuard
from protocol.addresses import check_address, default_address, default_socket_folder
from protocol.errors import InvalidParameter

logger = logging.getLogger(__name__)

Frame = bytes | memoryview

_SEND_QUEUE_MESSAGES = 128
"""To one client. What it does not read beyond them is merged (`backlog.py`)."""
_RECEIVE_QUEUE_MESSAGES = 32
"""Of one client, which is not read while they wait; the others do not notice."""
_MESSAGE_BYTES = 16 * 1024**2
_TOKEN_BYTES = 5
"""Most of a token on the wire."""
_PEER_HEARTBEAT_MS = 2_000
_PEER_SILENCE_MS = 60_000
"""Then a client is lost with its network. Longer than a step: ZMQ does not see the heartbeats of a
client whose receive queue is full."""
_MAX_UNIX_PATH_BYTES = 107


class ClientGone(Exception):
    """The client has left."""


class SlowConsumer(Exception):
    """The client is there, and its queue is full."""


def most_message_bytes(max_model_len: int | None) -> int:
    """Of a client's message: a request of that many tokens and their parameters. None: of any
    usual model."""
    return _MESSAGE_BYTES + _TOKEN_BYTES * (max_model_len or 0)


class Transport(Protocol):
    """Exchanges frames with clients, each known by its routing id."""

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to read, or after `timeout_s`."""
        ...

    def receive_all(self) -> Iterator[tuple[bytes, list[Frame]]]:
        """Messages that have arrived, by turns of the clients: (routing id, frames). Never
        blocks. What is not taken stays."""
        ...

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Queue a message for one client. Never blocks.

        Raises:
            ClientGone: the client has left.
            SlowConsumer: it does not read, and its queue is full.
        """
        ...


class ZmqTransport:
    """A ROUTER socket bound to `address`.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`; None is the private default socket.
        max_message_bytes: the connection of a client that sends a larger one is closed.

    Raises:
        AddressInUse: another engine listens there.
        ConfigurationError: the address cannot be bound.
    """

    def __init__(
        self, address: str | None, *, max_message_bytes: int = most_message_bytes(None)
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._resources = contextlib.ExitStack()
        try:
            self._bind(address)
        except BaseException:
            self._resources.close()
            raise

    def _bind(self, address: str | None) -> None:
        if address is None:
            make_private_folder(default_socket_folder())
            address = default_address()
        try:
            check_address(address)
        except InvalidParameter as error:
            raise ConfigurationError(f"--bind: {error}") from None
        if address.startswith("ipc://"):
            self._resources.enter_context(_owned_socket_path(Path(address.removeprefix("ipc://"))))
        context = self._resources.enter_context(zmq.Context())
        self._socket = self._resources.enter_context(context.socket(zmq.ROUTER))
        # An unknown routing id is an error rather than a silent drop: that is how the death of
        # a client shows.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self.max_message_bytes)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PEER_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PEER_SILENCE_MS)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        if address.startswith("tcp://") and "[" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(
                    f"{address} is in use; stop the process that listens there or choose "
                    "another address with --bind"
                ) from None
            raise ConfigurationError(f"cannot listen on {address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self.address.startswith("ipc://"):
            path = Path(self.address.removeprefix("ipc://"))
            path.chmod(0o600)
            guard = SocketGuard(path, self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED))
            self._resources.callback(guard.close)
            self._resources.callback(self._socket.disable_monitor)
        elif not _is_loopback(self.address):
            logger.warning(
                "%s IS OPEN TO THE NETWORK: whoever reaches this port can use this engine, see its "
                "requests and stop it; there are no keys and no encryption. Close the port to "
                "others, or use --bind tcp://127.0.0.1:PORT and a tunnel",
                self.address,
            )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, file_descriptor: int) -> None:
        """Let `wait` return also when this descriptor becomes readable."""
        self._poller.register(file_descriptor, zmq.POLLIN)

    def unwatch(self, file_descriptor: int) -> None:
        self._poller.unregister(file_descriptor)

    def wait(self, timeout_s: float) -> None:
        self._poller.poll(round(timeout_s * 1000))

    def receive_all(self) -> Iterator[tuple[bytes, list[Frame]]]:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            frames: list[Frame] = [part.buffer for part in parts[1:]]
            yield parts[0].bytes, frames

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        try:
            parts = [identity, frames[0], *map(_shared, frames[1:])]
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            raise SlowConsumer(f"{_SEND_QUEUE_MESSAGES} messages wait for it") from None
        except zmq.ZMQError as error:
            if error.errno in (zmq.ETERM, zmq.ENOTSOCK):
                raise
            reason = "its connection closed" if error.errno == zmq.EHOSTUNREACH else str(error)
            raise ClientGone(reason) from None

    def close(self) -> None:
        """Send what is queued (at most a second) and free the address."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


@functools.lru_cache(maxsize=1)
def _shared(frame: Frame) -> zmq.Frame:
    """A binary part is in memory once, however many clients it waits for: the tokenizer."""
    return zmq.Frame(frame)


def _is_loopback(endpoint: str) -> bool:
    """`endpoint` is ZMQ's own, with the address as numbers: tcp://[::1]:5555."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def make_private_folder(folder: Path) -> None:
    """A folder that only this user can enter.

    Raises:
        ConfigurationError: it exists and belongs to another user, or others may enter it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the socket's folder {folder}: {error.strerror}; choose an address with "
            "--bind"
        ) from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise ConfigurationError(
            f"{folder} belongs to another user; remove it or choose an address with --bind"
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(0o700)


@contextlib.contextmanager
def _owned_socket_path(path: Path) -> Iterator[None]:
    """Hold a lock beside the socket for as long as it is bound.

    ZMQ replaces an existing Unix socket without asking, so a second engine would take the first
    one's clients. The kernel drops the lock with the process, however it dies.
    """
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise ConfigurationError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, the system's limit is "
            f"{_MAX_UNIX_PATH_BYTES}; choose a shorter one with --bind"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"cannot listen on ipc://{path}: {path.parent} is not a folder; make it, or choose "
            "another address with --bind"
        )
    lock_path = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on ipc://{path}: {error.strerror}; choose another address with --bind"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AddressInUse(
                f"ipc://{path} is in use by another engine; stop it or choose another address "
                "with --bind"
            ) from None
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
