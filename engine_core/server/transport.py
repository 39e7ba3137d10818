"""How frames reach clients: the interface, and a ZMQ ROUTER socket with its address, lock and
permissions."""

import contextlib
import functools
import ipaddress
import logging
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, Self

import zmq

from engine_core.errors import AddressInUse, ConfigurationError
from engine_core.server.authentication import KeyCheck
from engine_core.server.clients import Rights
from engine_core.server.descriptors import SocketGuard
from engine_core.server.keys import KeyFolder
from engine_core.server.unix_socket import make_private_folder, owned_socket_path, private_umask
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
MOST_TOKENS = _MESSAGE_BYTES // 2 // _TOKEN_BYTES
"""Of a request, unless --max-model-len says more: the socket is older than the model."""
_PEER_HEARTBEAT_MS = 2_000
_PEER_SILENCE_MS = 60_000
"""Then a client is lost with its network. Longer than a step: ZMQ does not see the heartbeats of a
client whose receive queue is full."""
# as numbers: pyzmq's enumerations take longer to join than a frame to send
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_MORE = _NOBLOCK | int(zmq.SNDMORE)
_ROUTING_ID_BYTES = 5
"""Bytes of the ids that libzmq gives to connections."""


class ClientGone(Exception):
    """The client has left."""


class SlowConsumer(Exception):
    """The client is there, and its queue is full."""


def most_message_bytes(max_model_len: int | None, most_tensor_bytes: int = 0) -> int:
    """Of a client's message: a request of that many tokens and their parameters. None: of any
    usual model. `most_tensor_bytes`: of a frame behind it."""
    return max(_MESSAGE_BYTES + _TOKEN_BYTES * (max_model_len or 0), most_tensor_bytes)


class Transport(Protocol):
    """Exchanges frames with clients, each known by its routing id."""

    def wait(self, timeout_s: float) -> bool:
        """Return when there is something to read, or after `timeout_s`; says which."""

    def receive_all(self) -> Iterator[tuple[bytes, list[Frame]]]:
        """Messages that have arrived, by turns of the clients: (routing id, frames). Never
        blocks. What is not taken stays."""

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        """Queue a message for one client. Never blocks.

        Raises:
            ClientGone: the client has left.
            SlowConsumer: it does not read, and its queue is full.
        """


class ZmqTransport:
    """A ROUTER socket bound to `address`.

    Args:
        address: `ipc://PATH` or `tcp://HOST:PORT`; None is the private default socket.
        max_message_bytes: the connection of a client that sends a larger one is closed.
        keys: of the clients that may connect; for TCP only.
        is_insecure: whether a network may reach a TCP address without keys.

    Raises:
        AddressInUse: another engine listens there.
        ConfigurationError: the address cannot be bound, or is open to others and has no keys.
    """

    def __init__(
        self,
        address: str | None,
        *,
        keys: KeyFolder | None = None,
        is_insecure: bool = False,
        max_message_bytes: int = most_message_bytes(None),
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self._keys = keys
        self._key_check: KeyCheck | None = None
        self._resources = contextlib.ExitStack()
        try:
            self._bind(address, is_insecure)
        except BaseException:
            self._resources.close()
            raise

    def _bind(self, address: str | None, is_insecure: bool) -> None:
        if address is None:
            make_private_folder(default_socket_folder())
            address = default_address()
        try:
            check_address(address)
        except InvalidParameter as error:
            raise ConfigurationError(f"--bind: {error}") from None
        self._is_unix = address.startswith("ipc://")
        _check_protection(address, self._keys is not None, is_insecure)
        if self._is_unix:
            self._resources.enter_context(owned_socket_path(Path(address.removeprefix("ipc://"))))
        context = self._resources.enter_context(zmq.Context())
        self._poller = zmq.Poller()
        self._socket = self._resources.enter_context(context.socket(zmq.ROUTER))
        # An unknown routing id is an error rather than a silent drop: that is how the death of
        # a client shows.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE_MESSAGES)
        queue_bytes = _RECEIVE_QUEUE_MESSAGES * _MESSAGE_BYTES
        most_waiting = min(_RECEIVE_QUEUE_MESSAGES, queue_bytes // self.max_message_bytes)
        self._socket.setsockopt(zmq.RCVHWM, max(1, most_waiting))
        self._socket.setsockopt(zmq.MAXMSGSIZE, self.max_message_bytes)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PEER_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PEER_SILENCE_MS)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, _PEER_SILENCE_MS)
        self._socket.setsockopt(zmq.LINGER, 1_000)
        if address.startswith("tcp://") and "[" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            self._key_check = KeyCheck(context, self._socket, self._keys)
            self._resources.enter_context(self._key_check.socket)
            self._poller.register(self._key_check.socket, zmq.POLLIN)
        try:
            with private_umask():
                self._socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                raise AddressInUse(
                    f"{address} is in use; stop the process that listens there or choose "
                    "another address with --bind"
                ) from None
            raise ConfigurationError(f"cannot listen on {address}: {error}") from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if self._is_unix:
            path = Path(self.address.removeprefix("ipc://"))
            guard = SocketGuard(path, self._socket.get_monitor_socket(zmq.EVENT_ACCEPTED))
            self._resources.callback(guard.close)
            self._resources.callback(self._socket.disable_monitor)
        if is_insecure:
            logger.warning(
                "%s IS OPEN TO THE NETWORK (--insecure): whoever reaches this port can use this "
                "engine and read what its clients send and get; there are no keys and no "
                "encryption. Use --keys instead: docs/guides/security.md",
                self.address,
            )
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, file_descriptor: "int | zmq.Socket[bytes]") -> None:
        """Let `wait` return also when this becomes readable."""
        self._poller.register(file_descriptor, zmq.POLLIN)

    def unwatch(self, file_descriptor: int) -> None:
        self._poller.unregister(file_descriptor)

    def wait(self, timeout_s: float) -> bool:
        return bool(self._poller.poll(round(timeout_s * 1000)))

    def receive_all(self) -> Iterator[tuple[bytes, list[Frame]]]:
        if self._key_check is not None:
            self._key_check.answer_all()
        # asking takes less time than a receipt that fails
        while int(self._socket.getsockopt(_EVENTS)) & _POLLIN:
            try:
                part = self._socket.recv(_NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity, frames = part.bytes, list[Frame]()
            while part.more:  # messages arrive whole
                part = self._socket.recv(_NOBLOCK, copy=False)
                frames.append(part.buffer)
            if self._key_check is not None:
                # One that a client chose, unlike libzmq's: it may be another's that has left.
                if identity[:1] != b"\0":
                    continue
                identity += str(part.get("User-Id")).encode()
            yield identity, frames

    def rights(self, identity: bytes) -> Rights:
        """The rights of the client with this routing id."""
        if self._keys is None:
            return Rights(is_admin=self._is_unix)
        name = identity[_ROUTING_ID_BYTES:].decode()
        key = self._keys.authorized().get(name)
        return Rights(name, is_admin=key is not None and key.is_admin)

    def send(self, identity: bytes, frames: Sequence[Frame]) -> None:
        if self._key_check is not None:
            identity = identity[:_ROUTING_ID_BYTES]
        try:
            if len(frames) == 1:  # without what `send_multipart` makes of flags
                self._socket.send(identity, _MORE)
                self._socket.send(frames[0], _NOBLOCK)
            else:
                parts = [identity, frames[0], *map(_shared, frames[1:])]
                self._socket.send_multipart(parts, _NOBLOCK)
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

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.lru_cache(maxsize=1)
def _shared(frame: Frame) -> zmq.Frame:
    """A binary part is in memory once, however many clients it waits for: the tokenizer."""
    return zmq.Frame(frame)


def _check_protection(address: str, has_keys: bool, is_insecure: bool) -> None:
    """Raises ConfigurationError: the address has less protection than it needs, or an option for it
    has no effect."""
    is_tcp = address.startswith("tcp://")
    is_open = is_tcp and not is_loopback(address.removeprefix("tcp://").rpartition(":")[0])
    if has_keys and is_insecure:
        raise ConfigurationError("--keys and --insecure contradict each other; omit one of them")
    if has_keys and not is_tcp:
        raise ConfigurationError(
            "--keys has no effect on a Unix socket, which only this user can enter; omit it, or "
            "give --bind tcp://HOST:PORT"
        )
    if is_insecure and not is_open:
        raise ConfigurationError(
            f"--insecure has no effect on {address}, which no network reaches; omit it"
        )
    if is_open and not has_keys and not is_insecure:
        raise ConfigurationError(
            f"--bind {address} is open to the network, and there are no keys: whoever reaches the "
            "port could use this engine and read along. Make keys with `engine-core keys` and give "
            "--keys FOLDER, use --bind tcp://127.0.0.1:PORT and a tunnel, or say --insecure"
        )


def is_tcp(address: str | None) -> bool:
    return address is not None and address.startswith("tcp://")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it, whatever the name stands for."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None)
    except (OSError, UnicodeError):
        return False  # *, or the name of a network card
    return all(
        ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found
    )
