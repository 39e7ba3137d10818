"""Frames to and from one engine: what the client needs of a transport, and ZMQ as one. The ZMQ
sockets are read through the event loop's own poll: one callback takes all that arrived."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from frontend.errors import EngineClientError, EngineRefused, EngineUnavailable, InvalidInput
from protocol.keys import ClientKey
from protocol.private_files import foreign_owner

_NOBLOCK, _POLLIN = int(zmq.NOBLOCK), int(zmq.POLLIN)
"""Plain numbers: Python's own flags take as long as a call of ZMQ."""
_PEER_HEARTBEAT_MS = 2_000
_MESSAGES_PER_CALLBACK = 1
"""After this many, other tasks of the loop run: who has waited for a message goes on before the
next one is looked for."""
_LINGER_MS = 200
_NEVER_MS = 3_600_000
"""Until a socket would connect again by itself. It is closed long before; with -1 (never) libzmq
drops what has arrived and was not read when the connection ends, beyond a hundred messages."""
_BROKEN_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_MAX_MESSAGE_BYTES = 1024**3
_LOSS_EVENTS = (
    zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _BROKEN_HANDSHAKE
)

Frames = Sequence[bytes | memoryview]


OnLost = Callable[[str, EngineClientError | None], None]
"""Told why the peer is gone; with an error, because it does not take this client."""


class Transport(Protocol):
    """A connection that can be opened again after it was lost or disconnected."""

    def connect(self, on_frames: Callable[[Frames], None], on_lost: OnLost) -> None:
        """Open the connection. `on_frames` gets each message's frames; `on_lost` the reason, once,
        when the peer is gone.

        Raises:
            InvalidInput: the address is not valid.
            EngineUnavailable: there is certainly no engine at the address.
        """

    def send_frames(self, frames: Frames) -> None:
        """Queue one message's frames. Never blocks; dropped if there is no connection."""

    def receive_pending(self) -> None:
        """Deliver what has already arrived."""

    def disconnect(self) -> None:
        """Close the connection; what is queued is still sent if possible."""

    def close(self) -> None:
        """Disconnect and free all resources."""


class ZmqTransport:
    """A DEALER socket and its monitor. `address` is `ipc://PATH` or `tcp://HOST:PORT`; `key` is
    for an engine that takes only clients with one."""

    def __init__(self, address: str, key: ClientKey | None = None) -> None:
        self._address = address
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None

    def connect(self, on_frames: Callable[[Frames], None], on_lost: OnLost) -> None:
        _check_ipc_path(self._address)
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        # A peer lost with its network closes no connection. ZMQ's I/O threads exchange their own
        # heartbeats, which the engine answers however long its steps are.
        socket.setsockopt(zmq.HEARTBEAT_IVL, _PEER_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * _PEER_HEARTBEAT_MS)
        if self._address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _NEVER_MS)  # the connection has a time limit
        if self._key is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._key.server_public_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._key.public_key.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._key.secret_key.encode())
        self._socket, self._monitor = socket, socket.get_monitor_socket(_LOSS_EVENTS)
        self._loop.add_reader(_descriptor(socket), self.receive_pending)
        self._loop.add_reader(_descriptor(self._monitor), self._read_monitor)
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            self.disconnect()
            raise InvalidInput(
                f"address {self._address!r} cannot be used ({error}); use ipc://PATH or "
                "tcp://HOST:PORT"
            ) from None
        self._loop.call_soon(self._read_monitor)

    def send_frames(self, frames: Frames) -> None:
        if self._socket is None:
            return
        with contextlib.suppress(zmq.Again):  # the peer is gone: the monitor will say so
            if len(frames) == 1:
                self._socket.send(frames[0], _NOBLOCK)
            else:  # large frames are not copied; they may not change after this
                self._socket.send_multipart(frames, _NOBLOCK, copy=False)
        # ZMQ's descriptor signals an event once only, and sending may have consumed it.
        if self._has_message():
            self._loop.call_soon(self.receive_pending)

    def receive_pending(self) -> None:
        if self._receive(_MESSAGES_PER_CALLBACK):
            self._loop.call_soon(self._receive_next)

    def _receive_next(self) -> None:
        if self._has_message():  # half the time of `zmq.Again`
            self.receive_pending()

    def _has_message(self) -> bool:
        return self._socket is not None and bool(int(self._socket.getsockopt(zmq.EVENTS)) & _POLLIN)

    def _receive(self, max_messages: float) -> bool:
        """Returns whether there may be more."""
        num_messages = 0
        while num_messages < max_messages:
            if self._socket is None:
                return False
            try:
                frames = self._socket.recv_multipart(_NOBLOCK)
            except zmq.Again:
                return False
            self._on_frames(frames)
            num_messages += 1
        return True

    def disconnect(self) -> None:
        if self._socket is None or self._monitor is None:
            return
        socket, monitor = self._socket, self._monitor
        self._socket = self._monitor = None
        for each in (socket, monitor):
            self._loop.remove_reader(_descriptor(each))
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close()

    def close(self) -> None:
        self.disconnect()
        self._context.term()
        # they refer to the owner of this object: it could be freed by a full collection only
        self._on_frames = lambda _frames: None
        self._on_lost = lambda _reason, _error: None

    def _read_monitor(self) -> None:
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] & _LOSS_EVENTS:
                self._receive(float("inf"))  # all that the engine sent before the loss
                if self._socket is not None:
                    self.disconnect()
                    self._on_lost("the connection closed", self._refusal(event["event"]))

    def _refusal(self, event: int) -> EngineClientError | None:
        """Why there was no handshake, as far as that can be told."""
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and self._key is not None:
            return EngineRefused(
                f"the engine at {self._address} does not take the key {self._key.name!r}; have it "
                "added there with `engine-core keys add`"
            )
        if event & _BROKEN_HANDSHAKE and self._address.startswith("tcp://"):
            advice = (
                "it may ask for a key: give one made there by `engine-core keys add` with --keys"
                if self._key is None
                else f"the key {self._key.name!r} may be for another engine, or this one use none"
            )
            return EngineUnavailable(
                f"the engine at {self._address} ended the connection before it began; {advice}"
            )
        return None


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _check_ipc_path(address: str) -> None:
    """Refuse at once what would otherwise end in a timeout."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        try:
            owner = foreign_owner(Path(path))
        except (OSError, ValueError):
            raise EngineUnavailable(
                f"no engine answers at {address}: that socket does not exist; start one with "
                "`engine-core --model MODEL`"
            ) from None
        if owner is not None:
            raise EngineUnavailable(
                f"the socket {address} belongs to another user ({owner}), who could read what is "
                "sent; give the address of your own engine"
            )
