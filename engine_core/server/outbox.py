"""From messages to frames. A send to a dead client fails at once, so every client is sent something
at least once a heartbeat: its death frees its requests within that time. What a client does not
read yet is merged, up to a bound."""

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from engine_core.server.backlog import Backlog
from engine_core.server.clients import Client, ClientRegistry
from engine_core.server.limited_log import LimitedLog
from engine_core.server.transport import ClientGone, Frame, SlowConsumer, Transport
from protocol.base import Message
from protocol.codec import encode
from protocol.errors import ErrorCode
from protocol.outputs import EngineCoreOutputs, ErrorMessage, Heartbeat

logger = logging.getLogger(__name__)

_MAX_BACKLOG_BYTES = 16 * 1024**2
"""Of one client that does not read. Beyond it the client is dropped."""
_MAX_TOTAL_BYTES = 256 * 1024**2
"""Most bytes of all backlogs. Beyond it the client with most is dropped."""
_LAST_TRIES, _LAST_TRY_S = 20, 0.05
"""At the end: how often, and after how long, a backlog is tried again."""


class Outbox:
    """Sends to clients. A client that cannot be reached leaves the registry.

    Args:
        heartbeat_s: longest silence towards a client, in seconds.
        sleep: takes seconds.
    """

    def __init__(
        self,
        transport: Transport,
        clients: ClientRegistry,
        *,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._transport = transport
        self.clients = clients
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._sleep = sleep
        self._losses = LimitedLog(logger, logging.INFO, clock)
        self.backlogs: dict[Client, Backlog] = {}
        """Backlogs of clients whose queue is full."""
        self.backlog_bytes = 0
        """Bytes of all backlogs."""
        self._by_silence: OrderedDict[Client, None] = OrderedDict()
        """Clients that were sent something, and may have left since; the one that was sent nothing
        for the longest time first: a step does nothing for the others."""
        self.num_backlogs = 0
        """Backlogs so far."""
        self.num_dropped = 0
        """Clients that did not read."""
        self._untold: dict[bytes, Message] = {}
        """Why clients have lost their connection, as soon as their full queue has room."""
        self._state = Heartbeat()
        """The state that clients were told."""

    def tell_state(self, *, draining: bool, paused: bool) -> None:
        """To every client, if it starts or ends a pause; the rest with the next heartbeat."""
        is_news = paused != self._state.paused
        self._state = Heartbeat(draining=draining, paused=paused)
        if is_news:
            for client in list(self.clients):
                self.post(client, self._state)

    @property
    def has_backlogs(self) -> bool:
        """Whether anything waits for a client whose queue is full."""
        return bool(self.backlogs)

    def send(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """One step's outputs, by client index; then heartbeats to clients that were sent nothing
        for a while. Outputs of clients that have left are dropped."""
        self._tell_late()
        self._send_backlogs()
        for index, client_outputs in outputs.items():
            client = self.clients.by_index(index)
            if client is not None:
                client.request_ids.difference_update(client_outputs.finished_req_ids)
                self.post(client, client_outputs)
        self._send_heartbeats()

    def post(self, client: Client, message: Message, frames: Sequence[Frame] = ()) -> None:
        """One message, with the binary frames behind it, to one client. While its queue is full,
        its messages wait here, outputs merged."""
        backlog = self.backlogs.get(client)
        if backlog is None:
            self._tell_late()  # it may have said HELLO again
            if self._try_to_send(client, [encode(message), *frames]):
                return
            if self.clients.by_index(client.index) is None:
                return
            backlog = self.backlogs[client] = Backlog()
            self.num_backlogs += 1
        num_bytes = backlog.num_bytes
        backlog.add(message, frames)
        self.backlog_bytes += backlog.num_bytes - num_bytes
        if backlog.num_bytes > _MAX_BACKLOG_BYTES:
            self._drop(client)
        elif self.backlog_bytes > _MAX_TOTAL_BYTES:
            self._drop(max(self.backlogs, key=lambda each: self.backlogs[each].num_bytes))

    def offer(self, client: Client, message: Message) -> bool:
        """Send a message at once, or not at all. Returns False while the client's queue is full."""
        return client not in self.backlogs and self._try_to_send(client, [encode(message)])

    def close(self) -> None:
        """Clients that do not read get a second to do so."""
        for _ in range(_LAST_TRIES):
            self._send_backlogs()
            if not self.backlogs:
                return
            self._sleep(_LAST_TRY_S)

    def _try_to_send(self, client: Client, frames: Sequence[Frame]) -> bool:
        """False if it is gone, and then not in the registry any more, or if its queue is full."""
        try:
            self._transport.send(client.identity, frames)
        except SlowConsumer:
            return False
        except ClientGone as gone:
            self._losses.log("gone", f"{client!s:.100} is gone: {gone}")
            self._remove(client)
            return False
        client.last_sent_s = self._clock()
        self._by_silence[client] = None
        self._by_silence.move_to_end(client)
        return True

    def _send_backlogs(self) -> None:
        for client, backlog in list(self.backlogs.items()):
            if self.clients.by_index(client.index) is None:
                self._forget_backlog(client)
            # A heartbeat shows whether there is room, before much is encoded.
            elif self._try_to_send(client, [encode(self._state)]):
                while len(backlog) and self._try_to_send(client, backlog.first()):
                    num_bytes = backlog.num_bytes
                    backlog.pop_first()
                    self.backlog_bytes -= num_bytes - backlog.num_bytes
                if not len(backlog):
                    self._forget_backlog(client)

    def _forget_backlog(self, client: Client) -> None:
        backlog = self.backlogs.pop(client, None)
        self.backlog_bytes -= 0 if backlog is None else backlog.num_bytes

    def _remove(self, client: Client) -> None:
        self.clients.remove(client)
        self._forget_backlog(client)

    def _drop(self, client: Client) -> None:
        self.num_dropped += 1
        num_bytes = self.backlogs[client].num_bytes
        why = (
            f"it let {num_bytes} bytes of outputs pile up, the limit is {_MAX_BACKLOG_BYTES} and "
            f"{_MAX_TOTAL_BYTES} for all clients"
        )
        self._losses.log("dropped", f"{client!s:.100} is dropped: {why}")
        self._remove(client)
        self._untold[client.identity] = ErrorMessage(
            code=ErrorCode.SLOW_CONSUMER.value,
            message=f"this client was dropped, and its requests with it: {why}; read messages as "
            "they come, or ask for less at a time",
        )

    def send_unregistered(self, identity: bytes, message: Message) -> None:
        """Answer a client that has not said HELLO, or end a connection. Waits for a full queue; a
        client that was dropped is told why instead."""
        try:
            self._transport.send(identity, [encode(self._untold.get(identity, message))])
        except SlowConsumer:
            self._untold.setdefault(identity, message)
            return
        except ClientGone:
            logger.debug("an unregistered client left before the answer")
        self._untold.pop(identity, None)

    def _tell_late(self) -> None:
        for identity, why in list(self._untold.items()):
            self.send_unregistered(identity, why)

    def _send_heartbeats(self) -> None:
        due_s = self._clock() - self._heartbeat_s
        silent = itertools.takewhile(lambda each: each.last_sent_s <= due_s, self._by_silence)
        for client in list(silent):
            if self.clients.by_index(client.index) is client:
                self.post(client, self._state)
            else:
                del self._by_silence[client]
