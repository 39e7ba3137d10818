"""One connection to an engine, from HELLO to its loss: the end of the transport, an undecodable
message, or silence. A lost connection is replaced by a new one."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from frontend.engine.transport import Frames, Transport
from frontend.errors import EngineClientError, EngineRefused, EngineUnavailable, TooManyClients
from frontend.event_loop import Clock, Timer
from protocol.base import WIRE_VERSION, Message
from protocol.codec import check_wire_version, decode_engine_message, encode
from protocol.errors import ErrorCode, ProtocolError
from protocol.outputs import EngineMessage, ErrorMessage, Welcome
from protocol.requests import Goodbye, Hello

logger = logging.getLogger(__name__)

_NUM_SILENT_HEARTBEATS = 3


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """`silence_timeout_s` is the least silence that means a loss: an engine is silent during a
    step, which on a slow machine is longer than three heartbeats."""

    address: str
    """The engine's address, for error texts."""
    client_name: str = ""
    connect_timeout_s: float = 60.0
    reconnect_timeout_s: float = 60.0
    silence_timeout_s: float = 300.0


class Connection:
    """
    Args:
        on_message: gets every message behind WELCOME.
        on_lost: called once, with the reason in words, when an open connection is gone. Not
            called by `close`.
    """

    def __init__(
        self,
        transport: Transport,
        options: ConnectionOptions,
        *,
        clock: Clock,
        on_message: Callable[[EngineMessage], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._transport = transport
        self._address = options.address
        self._options = options
        self._clock = clock
        self._on_message = on_message
        self._on_lost = on_lost
        self.is_closed = False
        self._welcome: asyncio.Future[tuple[Welcome, Frames]] = (
            asyncio.get_running_loop().create_future()
        )
        self._last_received_s = clock.now()
        self._silence_limit_s = float("inf")
        self._silence_timer: Timer | None = None

    async def open(self, timeout_s: float) -> tuple[Welcome, Frames]:
        """Send HELLO and wait for WELCOME and its binary frames. Closes the connection if that
        fails.

        Raises:
            InvalidInput, EngineUnavailable: see `Transport.connect`; or no answer in time.
            EngineRefused: the engine does not accept this client.
        """
        options = self._options
        timer = self._clock.call_later(timeout_s, lambda: self._time_out(timeout_s))
        try:
            self._transport.connect(self._on_frames, self._fail)
            self.send(Hello(wire_version=WIRE_VERSION, client_name=options.client_name))
            welcome, frames = await self._welcome
            check_wire_version(welcome.wire_version)
        except ProtocolError as error:
            self.close()
            raise EngineRefused(f"the engine at {self._address}: {error}") from error
        except BaseException:
            self.close()
            raise
        finally:
            timer.cancel()
        self._silence_limit_s = max(
            options.silence_timeout_s, _NUM_SILENT_HEARTBEATS * welcome.heartbeat_s
        )
        self._watch_silence()
        return welcome, frames

    def send(self, message: Message, frames: Frames = ()) -> None:
        """Queue a message and the frames that its TensorRefs point at. Never blocks; dropped if the
        connection is closed or lost."""
        if not self.is_closed:
            self._transport.send_frames([encode(message), *frames])

    def close(self) -> None:
        """Say GOODBYE and disconnect. Calling it again does nothing."""
        if not self.is_closed:
            if self._welcome.done():
                self.send(Goodbye())
            self._shut_down()

    def _on_frames(self, frames: Frames) -> None:
        self._last_received_s = self._clock.now()
        try:
            message = decode_engine_message(frames[0])
        except ProtocolError as error:
            self._fail(str(error), error)
            return
        if self._welcome.done():
            try:
                self._on_message(message)
            except Exception as error:  # columns of other lengths, numbers that cannot be
                logger.exception("a message of the engine at %s", self._address)
                self._fail(f"its {type(message).__name__} makes no sense: {error!r:.300}")
        elif isinstance(message, Welcome):
            self._welcome.set_result((message, frames[1:]))
        elif isinstance(message, ErrorMessage):
            is_full = message.code == ErrorCode.TOO_MANY_CLIENTS
            kind = TooManyClients if is_full else EngineRefused
            self._welcome.set_exception(
                kind(f"the engine at {self._address} refused: {message.message}")
            )

    def _watch_silence(self) -> None:
        if self.silence_s() >= self._silence_limit_s:
            self._transport.receive_pending()  # this event loop may have been busy itself
            if not self.is_closed and self.silence_s() >= self._silence_limit_s:
                self._fail(f"it was silent for {self._silence_limit_s:g} s")
        if not self.is_closed:
            self._silence_timer = self._clock.call_later(
                self._silence_limit_s / _NUM_SILENT_HEARTBEATS, self._watch_silence
            )

    def silence_s(self) -> float:
        """Seconds since the engine has sent anything."""
        return self._clock.now() - self._last_received_s

    def _time_out(self, timeout_s: float) -> None:
        if not self._welcome.done():
            self._welcome.set_exception(self._unavailable(f" (waited {timeout_s:g} s)"))

    def _fail(self, reason: str, error: ProtocolError | EngineClientError | None = None) -> None:
        self._shut_down()
        if self._welcome.done():
            self._on_lost(reason)
        else:
            refused = self._unavailable(": the connection was refused")
            self._welcome.set_exception(error or refused)

    def _unavailable(self, why: str) -> EngineUnavailable:
        return EngineUnavailable(
            f"no engine answers at {self._address}{why}; start one with `engine-core --model MODEL`"
        )

    def _shut_down(self) -> None:
        self.is_closed = True
        if self._silence_timer is not None:
            self._silence_timer.cancel()
        self._transport.disconnect()
