"""From messages to frames. A send to a dead client fails at once, so every client is sent something
at least once a heartbeat: its death frees its requests within that time."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from engine_core.server.clients import Client, ClientRegistry
from engine_core.server.limited_log import LimitedLog
from engine_core.server.transport import ClientGone, Frame, SlowConsumer, Transport
from protocol.base import Message
from protocol.codec import encode
from protocol.errors import ErrorCode
from protocol.outputs import EngineCoreOutputs, ErrorMessage, Heartbeat

logger = logging.getLogger(__name__)


class Outbox:
    """Sends to clients. A client that cannot be reached leaves the registry.

    Args:
        heartbeat_s: longest silence towards a client, in seconds.
    """

    def __init__(
        self,
        transport: Transport,
        clients: ClientRegistry,
        *,
        heartbeat_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._clients = clients
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._losses = LimitedLog(logger, logging.INFO, clock)
        self._dropped: dict[bytes, ErrorMessage] = {}
        """What clients that do not read are told as soon as their queue has room."""
        self.draining = False

    def send(self, outputs: Mapping[int, EngineCoreOutputs]) -> None:
        """One step's outputs, by client index; then heartbeats to clients that were sent nothing
        for a while. Outputs of clients that have left are dropped."""
        for index, client_outputs in outputs.items():
            client = self._clients.by_index(index)
            if client is not None:
                client.request_ids.difference_update(client_outputs.finished_req_ids)
                self.post(client, client_outputs)
        self._send_heartbeats()

    def post(self, client: Client, message: Message, frames: Sequence[Frame] = ()) -> None:
        """One message, with the binary frames behind it, to one client."""
        try:
            self._transport.send(client.identity, [encode(message), *frames])
        except ClientGone as gone:
            self._losses.log("gone", f"{client!s:.100} is gone: {gone}")
            self._clients.remove(client)
            if isinstance(gone, SlowConsumer):
                self._dropped[client.identity] = ErrorMessage(
                    code=ErrorCode.SLOW_CONSUMER.value,
                    message=f"this client was dropped, and its requests with it: {gone}; read "
                    "messages as they come, or ask for less at a time",
                )
        else:
            client.last_sent_s = self._clock()

    def send_unregistered(self, identity: bytes, message: Message) -> None:
        """Answer a client that has not said HELLO. One that was dropped is told why instead."""
        try:
            self._transport.send(identity, [encode(self._dropped.get(identity, message))])
        except SlowConsumer:
            return
        except ClientGone:
            logger.debug("an unregistered client left before the answer")
        self._dropped.pop(identity, None)

    def _send_heartbeats(self) -> None:
        for identity, why in list(self._dropped.items()):
            self.send_unregistered(identity, why)
        due_s = self._clock() - self._heartbeat_s
        for client in self._clients:
            if client.last_sent_s <= due_s:
                self.post(client, Heartbeat(draining=self.draining))
