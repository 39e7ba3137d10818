"""From frames to messages of known clients. What cannot be understood is answered here: garbage,
another wire version, a client that sent no HELLO."""

import itertools
import logging
import sys
import time
from collections.abc import Callable, Iterator

from engine_core.server.clients import Client, ClientRegistry, Rights
from engine_core.server.limited_log import LimitedLog
from engine_core.server.outbox import Outbox
from engine_core.server.transport import Frame, Transport
from protocol.base import Message
from protocol.codec import check_wire_version, decode_client_message, request_id_of
from protocol.errors import ErrorCode, MalformedMessage, WireVersionMismatch
from protocol.outputs import ErrorMessage, Rejected
from protocol.requests import Abort, Call, ClientMessage, EngineRequest, Goodbye, Hello

logger = logging.getLogger(__name__)

Incoming = tuple[Client, EngineRequest | Abort | Call]

_MAX_MESSAGES = 256
_MAX_NAME_CHARS = 100
_MAX_DRAIN_S = 0.002
"""So much of the loop's time between two steps: running requests do not wait for a flood."""
_BACKLOG_WAIT_S = 0.02
"""While a client has not read all: ZMQ does not say when its queue has room again."""


class Inbox:
    """Reads the transport for the loop.

    Args:
        idle_wait_s: how long a blocking drain waits; short enough for heartbeats to be on time.
        welcome: makes the answer to a HELLO: the message and its binary frames.
        max_clients: a HELLO of one more is refused.
        rights: of a routing id; default: all.
        while_quiet: called in a blocking drain when nothing has come for `idle_wait_s`; some tens
            of milliseconds of work that later requests need not wait for.
        clock: seconds; the loop's.
    """

    def __init__(
        self,
        transport: Transport,
        clients: ClientRegistry,
        outbox: Outbox,
        *,
        idle_wait_s: float,
        welcome: Callable[[Hello], tuple[Message, list[Frame]]],
        max_clients: int = 1024,
        rights: Callable[[bytes], Rights] = lambda _identity: Rights(),
        while_quiet: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._clients = clients
        self.outbox = outbox
        self._idle_wait_s = idle_wait_s
        self._welcome = welcome
        self._max_clients = max_clients
        self._rights = rights
        self._while_quiet = while_quiet
        self._clock = clock
        self._arrivals = LimitedLog(logger, logging.INFO, clock)
        self._refusals = LimitedLog(logger, logging.WARNING, clock)

    @property
    def num_refused_messages(self) -> int:
        return self._refusals.num_events

    def refuse_unanswerable(self, client: Client, what: str) -> str:
        """Count a message whose handling has failed, in an `except` block, and log how. Returns
        what to tell the client."""
        self._refusals.log(ErrorCode.INTERNAL, f"{what} of {client!s:.100} failed", exc_info=True)
        return f"{what} failed: {sys.exception()!r:.300}; report it with the engine's log"

    def drain(self, *, block: bool) -> Iterator[Incoming]:
        """What has arrived, in each client's order, by turns of the clients: at most so many
        messages, and for so long, the time that the caller takes for each included. The rest stays
        for the next call. With `block`, wait a while if there is nothing."""
        if block:
            is_behind = self.outbox.has_backlogs
            has_some = self._transport.wait(_BACKLOG_WAIT_S if is_behind else self._idle_wait_s)
            if not has_some and not is_behind:
                self._while_quiet()
        deadline_s = self._clock() + _MAX_DRAIN_S
        for identity, frames in itertools.islice(self._transport.receive_all(), _MAX_MESSAGES):
            client = self._clients.find(identity)
            message = self._decode(identity, client, frames)
            match message:
                case None:
                    pass
                case Hello():
                    self._welcome_client(identity, message)
                case Goodbye():
                    if client is not None:  # else it was found dead before, or dropped
                        self._clients.remove(client)
                case _ if client is None:
                    self._send_error(
                        identity, ErrorCode.HELLO_REQUIRED, "say HELLO before anything else"
                    )
                case _:
                    client.frames = frames[1:]
                    yield client, message
                    client.frames = ()
            if self._clock() >= deadline_s:
                return

    def _decode(
        self, identity: bytes, client: Client | None, frames: list[Frame]
    ) -> ClientMessage | None:
        try:
            if not frames:
                raise MalformedMessage("not a client message: it has no frames")
            message = decode_client_message(frames[0])
            if isinstance(message, Hello):
                check_wire_version(message.wire_version)
            return message
        except WireVersionMismatch as error:
            self._send_error(identity, ErrorCode.WIRE_VERSION, str(error))
        except MalformedMessage as error:
            request_id = request_id_of(frames[0]) if frames else None
            if client is not None and request_id is not None:
                # A request that says its id can be refused as that request.
                reason = str(error).removeprefix("not a client message: ")
                self._refusals.log(
                    ErrorCode.INVALID_REQUEST,
                    f"{client!s:.100} sent an invalid request {request_id!r:.100}: {reason}",
                )
                self.outbox.post(
                    client,
                    Rejected(request_id=request_id, code=ErrorCode.INVALID_REQUEST, message=reason),
                )
            else:
                self._send_error(identity, ErrorCode.MALFORMED_MESSAGE, str(error))
        return None

    def _welcome_client(self, identity: bytes, hello: Hello) -> None:
        if self._clients.find(identity) is None and len(self._clients) >= self._max_clients:
            self._send_error(
                identity,
                ErrorCode.TOO_MANY_CLIENTS,
                f"{len(self._clients)} clients are connected, the limit is {self._max_clients}; "
                "close one, or start the engine with a larger --max-clients",
            )
            return
        name = hello.client_name[:_MAX_NAME_CHARS]
        client = self._clients.add(identity, name, self._rights(identity))
        self._arrivals.log("connected", f"{client!s:.100} connected")
        message, frames = self._welcome(hello)
        self.outbox.post(client, message, frames)

    def _send_error(self, identity: bytes, code: ErrorCode, text: str) -> None:
        self._refusals.log(code, f"refused a message: {text}")
        self.outbox.send_unregistered(identity, ErrorMessage(code=code.value, message=text))
