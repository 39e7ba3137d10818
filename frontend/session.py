"""What this client has running on one engine, across the loss and return of that engine.

Owns the live requests, the pending calls and the recovery. Must not know text or prompts.

    connected --lost, requests live--> recovering --back, same model--> connected
                                           |---------not in time------> disconnected
    connected --lost, nothing live--> disconnected --next use--> connected
"""

import asyncio
import dataclasses
import logging
from typing import assert_never

import zmq

from frontend.connection import Connection, Frames
from frontend.daemon import ChildDaemon
from frontend.errors import (
    CallRefused,
    ClientClosed,
    EngineClientError,
    EngineDied,
    EngineUnavailable,
    rejection,
)
from frontend.live_request import LiveRequest
from frontend.routes import RouteTable
from protocol.calls import AnyCall, AnyResult
from protocol.outputs import (
    CallFailed,
    CallResult,
    EngineCoreOutputs,
    EngineMessage,
    ErrorMessage,
    Heartbeat,
    Rejected,
    Welcome,
)
from protocol.requests import Abort, Call

logger = logging.getLogger(__name__)

_RETRY_S = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class SessionOptions:
    """Durations in seconds."""

    client_name: str
    wants_tokenizer: bool
    connect_timeout_s: float
    reconnect_timeout_s: float
    silence_timeout_s: float


class EngineSession:
    """Requests and calls on the engine at `address`.

    Args:
        child: the engine's process, if this client started it: its end is final, and reported
            with its last words.
    """

    def __init__(
        self, address: str, options: SessionOptions, *, child: ChildDaemon | None = None
    ) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        self.welcome_frames: Frames = ()
        self._options = options
        self._child = child
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._connection: Connection | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._is_closed = False
        self._routes = RouteTable()
        self._calls: dict[int, asyncio.Future[AnyResult]] = {}
        self._num_calls = 0

    async def ready(self) -> None:
        """Return once connected: wait for a recovery, or try once if there is none.

        Raises:
            EngineUnavailable, EngineRefused, ClientClosed, EngineDied.
        """
        if self._is_closed:
            raise ClientClosed("this client is closed; make a new one")
        while self._connection is None:
            if self._recovery is None:
                self._recovery = asyncio.create_task(self._connect())
                self._recovery.add_done_callback(self._recovery_ended)
            await asyncio.shield(self._recovery)

    def submit(self, request: LiveRequest) -> None:
        """Send a request. It must be released in the end."""
        assert self._connection is not None
        for message in self._routes.open(request):
            self._connection.send(message)

    def release(self, request: LiveRequest) -> None:
        """Forget a request; the engine is told to stop what still runs of it."""
        self._tell_abort(self._routes.drop(request))

    async def call(self, call: AnyCall) -> AnyResult:
        """
        Raises:
            CallRefused: the engine does not want to.
            EngineDied: it was lost before it answered.
        """
        await self.ready()
        assert self._connection is not None
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[AnyResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._connection.send(Call(call_id=call_id, call=call))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def close(self) -> None:
        """End every request with ClientClosed, say GOODBYE, free the socket."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(ClientClosed("this client was closed"))
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.wait([self._recovery])
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._context.term()

    def _tell_abort(self, wire_ids: list[str]) -> None:
        if wire_ids and self._connection is not None:
            self._connection.send(Abort(request_ids=tuple(wire_ids)))

    def _on_message(self, message: EngineMessage, _frames: Frames) -> None:
        match message:
            case EngineCoreOutputs():
                self._tell_abort(self._routes.deliver(message))
            case Rejected():
                request = self._routes.rejected(message.request_id)
                if request is not None:
                    request.fail(
                        rejection(message.message, request_id=request.request_id, code=message.code)
                    )
                    self.release(request)
            case CallResult():
                self._answer(message.call_id, message.result)
            case CallFailed():
                self._answer(message.call_id, CallRefused(message.message, code=message.code))
            case ErrorMessage():
                # The engine did not understand us or no longer knows us: start afresh.
                logger.warning("the engine at %s complains: %s", self.address, message.message)
                if self._connection is not None:
                    self._connection.close()
                self._on_lost(f"it complained: {message.message}")
            case Heartbeat() | Welcome():
                pass
            case _:
                assert_never(message)

    def _answer(self, call_id: int, answer: AnyResult | Exception) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _on_lost(self, reason: str) -> None:
        if self._is_closed or self._connection is None:
            return
        self._connection = None
        logger.warning("lost the engine at %s: %s", self.address, reason)
        died = EngineDied(f"the engine at {self.address} is gone: {reason}", address=self.address)
        for call_id in list(self._calls):
            self._answer(call_id, died)
        if len(self._routes) or self._child is not None:
            self._recovery = asyncio.create_task(self._recover(reason))
            self._recovery.add_done_callback(self._recovery_ended)

    def _recovery_ended(self, task: asyncio.Task[None]) -> None:
        if self._recovery is task:
            self._recovery = None
        if not task.cancelled():
            task.exception()  # whoever waited has seen it; nobody else needs to

    async def _connect(self) -> None:
        if self._child is not None and self.welcome is not None:
            raise EngineDied(await self._child.obituary(), address=self.address)
        options = self._options
        connection = Connection(
            self._context, self.address, on_message=self._on_message, on_lost=self._on_lost
        )
        self.welcome, self.welcome_frames = await connection.open(
            client_name=options.client_name,
            wants_tokenizer=options.wants_tokenizer,
            timeout_s=options.connect_timeout_s,
            silence_timeout_s=options.silence_timeout_s,
        )
        if connection.is_closed:
            raise EngineUnavailable(f"the engine at {self.address} went away; try again")
        self._connection = connection

    async def _recover(self, reason: str) -> None:
        """Wait for the engine to come back; resume what was interrupted, or end it."""
        assert self.welcome is not None
        fingerprint = self.welcome.model.fingerprint
        try:
            await self._reconnect(reason)
        except EngineClientError as error:
            self._fail_all(error)
            raise
        if self.welcome.model.fingerprint != fingerprint:
            self._fail_all(
                EngineDied(
                    f"the engine at {self.address} came back with another model "
                    f"({self.welcome.model.name}); send the request again",
                    address=self.address,
                )
            )
            return
        for request in self._routes.drop_all():
            request.metrics.num_resumptions += 1
            self.submit(request)

    async def _reconnect(self, reason: str) -> None:
        loop = asyncio.get_running_loop()
        limit_s = self._options.reconnect_timeout_s
        deadline_s = loop.time() + limit_s
        while True:
            try:
                async with asyncio.timeout_at(max(deadline_s, loop.time() + _RETRY_S)):
                    await self._connect()
                return
            except (EngineUnavailable, TimeoutError):
                if loop.time() + _RETRY_S >= deadline_s:
                    raise EngineDied(
                        f"the engine at {self.address} is gone ({reason}) and did not come back "
                        f"within {limit_s:g} s; start it again with `engine-core --model MODEL`",
                        address=self.address,
                    ) from None
            await asyncio.sleep(_RETRY_S)

    def _fail_all(self, error: Exception) -> None:
        for request in self._routes.drop_all():
            request.fail(error)
        for call_id in list(self._calls):
            self._answer(call_id, error)
