"""One connection to an engine, from HELLO to its loss. A lost one is replaced, never mended.

Owns the socket, the handshake and the discovery that the engine is gone. Must not know requests
or text. The raw socket is read through the loop's own poll: one callback takes all that arrived.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from frontend.errors import EngineRefused, EngineUnavailable, InvalidInput
from protocol.base import WIRE_VERSION, Message
from protocol.codec import check_wire_version, decode_engine_message, encode
from protocol.errors import ProtocolError
from protocol.outputs import EngineMessage, ErrorMessage, Welcome
from protocol.requests import Goodbye, Hello

_NUM_SILENT_HEARTBEATS = 3
_PEER_HEARTBEAT_MS = 2_000
_MESSAGES_PER_CALLBACK = 64
"""After so many, other tasks of the loop get their turn."""
_LINGER_MS = 200
_LOSS_EVENTS = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

Frames = Sequence[bytes]


class Connection:
    """
    Args:
        context: of the owner, who closes it after this connection.
        address: `ipc://PATH` or `tcp://HOST:PORT`.
        on_message: gets every message behind WELCOME, with its binary frames.
        on_lost: called once, with the reason in words, when an open connection is gone. Not
            called by `close`.

    Raises:
        InvalidInput: the address is not one.
        EngineUnavailable: there is no socket at an `ipc://` address.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        *,
        on_message: Callable[[EngineMessage, Frames], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.address = address
        self._on_message = on_message
        self._on_lost = on_lost
        self._is_closed = False
        self._welcome: asyncio.Future[tuple[Welcome, Frames]] | None = None
        self._silence_limit_s = float("inf")
        self._silence_check: asyncio.TimerHandle | None = None
        _check_ipc_path(address)
        self._loop = asyncio.get_running_loop()
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        # A peer that the network lost does not close its connection; ZMQ's I/O thread asks for it,
        # and the engine's answers however long its steps are.
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _PEER_HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * _PEER_HEARTBEAT_MS)
        if address.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        self._monitor = self._socket.get_monitor_socket(_LOSS_EVENTS)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise InvalidInput(
                f"address {address!r} cannot be used ({error}); use ipc://PATH or tcp://HOST:PORT"
            ) from None
        self._last_heard_s = self._loop.time()
        self._loop.add_reader(_descriptor(self._socket), self._read)
        self._loop.add_reader(_descriptor(self._monitor), self._read_monitor)

    async def open(
        self,
        *,
        client_name: str,
        wants_tokenizer: bool,
        timeout_s: float,
        silence_timeout_s: float,
    ) -> tuple[Welcome, Frames]:
        """Introduce ourselves. Closes the connection if that fails.

        Args:
            silence_timeout_s: least silence that means a loss. An engine is silent for as long
                as a step takes it, which on a slow machine is longer than three heartbeats; its
                death shows at once by other means.

        Returns:
            The engine's WELCOME and its binary frames.

        Raises:
            EngineUnavailable: nobody answered.
            EngineRefused: the engine does not want this client.
        """
        self._welcome = self._loop.create_future()
        try:
            self.send(
                Hello(
                    wire_version=WIRE_VERSION,
                    client_name=client_name,
                    wants_tokenizer=wants_tokenizer,
                )
            )
            self._loop.call_soon(self._read_monitor)
            async with asyncio.timeout(timeout_s):
                welcome, frames = await self._welcome
            check_wire_version(welcome.wire_version)
        except TimeoutError:
            self.close()
            raise EngineUnavailable(
                f"no engine answers at {self.address} (waited {timeout_s:g} s); start one with "
                "`engine-core --model MODEL`"
            ) from None
        except ProtocolError as error:
            self.close()
            raise EngineRefused(f"the engine at {self.address}: {error}") from None
        except BaseException:
            self.close()
            raise
        self._silence_limit_s = max(silence_timeout_s, _NUM_SILENT_HEARTBEATS * welcome.heartbeat_s)
        self._watch_silence()
        return welcome, frames

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Queue a message. Never blocks; on a closed connection it is dropped, as on a lost one."""
        if self._is_closed:
            return
        self._socket.send_multipart([encode(message), *frames], zmq.NOBLOCK)
        # ZMQ's descriptor tells of news once only, and sending may have used that up.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def close(self) -> None:
        """Say GOODBYE and free the socket. Calling it again does nothing."""
        if not self._is_closed:
            if self._welcome is not None and self._welcome.done():
                with contextlib.suppress(zmq.ZMQError):
                    self._socket.send(encode(Goodbye()), zmq.NOBLOCK)
            self._shut()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _read(self) -> None:
        for _ in range(_MESSAGES_PER_CALLBACK):
            if self._is_closed:
                return
            try:
                frame, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._last_heard_s = self._loop.time()
            try:
                message = decode_engine_message(frame)
            except ProtocolError as error:
                self._fail(str(error), error)
                return
            self._receive(message, frames)
        self._loop.call_soon(self._read)

    def _receive(self, message: EngineMessage, frames: Frames) -> None:
        if self._welcome is None or self._welcome.done():
            self._on_message(message, frames)
        elif isinstance(message, Welcome):
            self._welcome.set_result((message, frames))
        elif isinstance(message, ErrorMessage):
            self._welcome.set_exception(
                EngineRefused(f"the engine at {self.address} refused: {message.message}")
            )

    def _read_monitor(self) -> None:
        while not self._is_closed:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] & _LOSS_EVENTS:
                self._read()  # what the engine sent before it went
                if not self._is_closed:
                    self._fail("the connection closed")

    def _watch_silence(self) -> None:
        if self._is_closed:
            return
        if self._silence_s() >= self._silence_limit_s:
            self._read()  # this loop may be the one that was busy
            if not self._is_closed and self._silence_s() >= self._silence_limit_s:
                self._fail(f"it was silent for {self._silence_limit_s:g} s")
        if not self._is_closed:
            self._silence_check = self._loop.call_later(
                self._silence_limit_s / _NUM_SILENT_HEARTBEATS, self._watch_silence
            )

    def _silence_s(self) -> float:
        return self._loop.time() - self._last_heard_s

    def _fail(self, reason: str, error: ProtocolError | None = None) -> None:
        self._shut()
        if self._welcome is None or not self._welcome.done():
            if self._welcome is not None:
                self._welcome.set_exception(error or self._unavailable())
        else:
            self._on_lost(reason)

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"no engine answers at {self.address}: the connection was refused; start one with "
            "`engine-core --model MODEL`"
        )

    def _shut(self) -> None:
        self._is_closed = True
        if self._silence_check is not None:
            self._silence_check.cancel()
        for socket in (self._socket, self._monitor):
            self._loop.remove_reader(_descriptor(socket))
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))


def _check_ipc_path(address: str) -> None:
    """Tell at once what would otherwise end in a timeout."""
    if address.startswith("ipc://") and not address.startswith("ipc://@"):
        path = address.removeprefix("ipc://")
        if not path or not Path(path).exists():
            raise EngineUnavailable(
                f"no engine answers at {address}: that socket does not exist; start one with "
                "`engine-core --model MODEL`"
            )
