"""What this client has in flight on one engine, across the loss and return of that engine."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol, Unpack, assert_never

import msgspec

from frontend.engine.link import EngineLink, LinkArguments
from frontend.errors import (
    CallRefused,
    ClientClosed,
    EngineClientError,
    EngineDied,
    QueueFull,
    RequestRejected,
)
from frontend.output_processor import OutputProcessor
from frontend.request_state import RequestState
from protocol.cache_events import CacheEvents
from protocol.calls import AdapterInfo, AnyCall, AnyResult
from protocol.errors import ErrorCode
from protocol.outputs import (
    AdaptersUpdated,
    CallFailed,
    CallResult,
    EngineCoreOutputs,
    EngineMessage,
    ErrorMessage,
    Heartbeat,
    Rejected,
    WeightsUpdated,
    Welcome,
)
from protocol.requests import Abort, Call

logger = logging.getLogger(__name__)

Arithmetic = tuple[str, ...]
"""`ModelInfo.arithmetic`: engines where it is equal give equal tokens."""

_MAX_REPORTS = 3
"""So many errors may the engine report in a row while a request makes no progress."""
_MAY_MOVE = (
    *(ErrorCode.DRAINING, ErrorCode.QUEUE_FULL),
    *(ErrorCode.WEIGHTS_REFUSED, ErrorCode.WRONG_STATE),
)
"""Refused so, a request may be another engine's."""


class Neighbours(Protocol):
    """Other engines of the same model, which take over what one cannot finish."""

    def on_lost(self, session: "EngineSession", arithmetic: Arithmetic) -> None:
        """Requests in flight may move to engines of that arithmetic; the others stay with it."""

    def on_connected(self, session: "EngineSession") -> None: ...

    def on_paused(self, session: "EngineSession") -> None:
        """It starts no requests, or again some."""

    def on_cache_events(self, session: "EngineSession", events: CacheEvents) -> None:
        """Note that what this engine's prefix cache holds has changed."""

    def why_not_moved(self, session: "EngineSession", request: RequestState) -> str:
        """Why no other engine goes on with it; empty if none is there."""

    def take_refused(self, session: "EngineSession", request: RequestState) -> bool:
        """Whether another engine has taken a request that this one is too full for, drains, or has
        other weights for."""


class EngineSession(EngineLink):
    """Requests and calls on one engine.

    Args:
        requests: those of all sessions of a client; default: of this one alone.
        neighbours: None: it has none.
    """

    def __init__(
        self,
        *,
        requests: OutputProcessor | None = None,
        neighbours: Neighbours | None = None,
        **how: Unpack[LinkArguments],
    ) -> None:
        super().__init__(**how)
        self._weights = ("", "")
        """The engine's id and the fingerprint of its weights, as last heard."""
        self._fingerprints: dict[int, str] = {}
        """Fingerprints of its weights by version, if requests may move."""
        self.adapters: dict[str, str] = {}
        """Fingerprints by name, as last heard."""
        self.requests = OutputProcessor(how["clock"].now) if requests is None else requests
        self.is_draining = False
        self.is_paused = False
        """It starts no requests."""
        self._neighbours = neighbours
        self._calls: dict[int, asyncio.Future[AnyResult]] = {}
        self._num_calls = 0

    @property
    def arithmetic(self) -> Arithmetic | None:
        """The engine's arithmetic, as last heard. None: never."""
        if self.welcome is None:
            return None
        return self._weights[1], *self.welcome.model.arithmetic[1:]

    def submit(self, request: RequestState) -> None:
        """Send a request. It must be given to `release` in the end."""
        self.requests.add_request(request)
        self.resume(request)

    def resume(self, request: RequestState) -> None:
        """Send a submitted request, now or when the engine is back: what is missing of it."""
        self._send_request(request)
        if self._connection is None and self._recovery is None:
            self._start_recovery(self._recover())

    def release(self, request: RequestState) -> None:
        """Forget a request; the engine stops what still runs of it."""
        self._send_abort(self.requests.remove_request(request))

    def withdraw(self, request: RequestState) -> None:
        """The engine stops what still runs of it, and another one is to be sent it."""
        self._send_abort(self.requests.withdraw(request))

    async def call(self, call: AnyCall) -> AnyResult:
        """Raises CallRefused, or EngineDied if the engine was lost before it answered."""
        await self.ready()
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[AnyResult] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(Call(call_id=call_id, call=call))
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def close(self) -> None:
        """End every request with ClientClosed, say GOODBYE, close the transport."""
        if self._is_closed:
            return
        self._is_closed = True
        self._fail_all(ClientClosed("this client was closed"))
        await super().close()

    def _send_request(self, request: RequestState) -> None:
        if request.wire.adapter is not None and not request.has_started:
            request.adapter_fingerprint = self.adapters.get(request.wire.adapter)
        known = self.welcome and self.welcome.disaggregation
        sources = known.kv_sources if known else ()
        for message in self.requests.wire_requests(request, self):
            if message.kv_source not in (None, *sources):
                message = msgspec.structs.replace(message, kv_source=None)
            self._send(message, request.frames)

    def _send_abort(self, wire_ids: list[str]) -> None:
        if wire_ids:
            self._send(Abort(request_ids=tuple(wire_ids)))

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case EngineCoreOutputs(engine_ends=True) if self._neighbours and self._connection:
                self._disconnect()
                self._on_lost("it ended with these requests unfinished")
            case EngineCoreOutputs():
                fingerprint = self._fingerprints.get(message.weights_version)
                for abort in self.requests.process_outputs(message, fingerprint):
                    self._send(abort)
                self._num_losses = 0
            case Rejected():
                self._on_rejected(message)
            case CallResult():
                self._answer_call(message.call_id, message.result)
            case CallFailed():
                self._answer_call(message.call_id, CallRefused(message.message, code=message.code))
            case ErrorMessage():
                # The engine did not understand a message, or dropped this client.
                logger.warning("the engine at %s reports: %s", self._address, message.message)
                self._disconnect()
                if message.code != ErrorCode.SLOW_CONSUMER:  # the fault of no request
                    self._count_report(message)
                self._on_lost(f"it reported: {message.message}")
            case WeightsUpdated():
                self._note_weights(self._weights[0], message.weights_version, message.fingerprint)
            case AdaptersUpdated():
                self.adapters = _by_name(message.adapters)
            case Heartbeat():
                self.is_draining = message.draining
                if self.is_paused != message.paused:
                    self.is_paused = message.paused
                    if self._neighbours is not None:
                        self._neighbours.on_paused(self)
            case CacheEvents():
                if self._neighbours is not None:  # else nobody has asked
                    self._neighbours.on_cache_events(self, message)
            case Welcome():
                pass
            case _:
                assert_never(message)

    def _note_weights(self, engine_id: str, version: int, fingerprint: str) -> None:
        self._weights = engine_id, fingerprint
        if self._neighbours is not None:
            self._fingerprints[version] = fingerprint

    def _on_rejected(self, message: Rejected) -> None:
        is_draining = message.code is ErrorCode.DRAINING
        self.is_draining |= is_draining
        request = self.requests.get_in_flight(message.request_id)
        may_move = self._neighbours is not None and message.code in _MAY_MOVE
        if may_move and request is not None and not request.finished:
            assert self._neighbours is not None
            if self._neighbours.take_refused(self, request):
                return
        request = self.requests.pop_rejected(message.request_id, keep_resumed=is_draining)
        if request is not None:
            kind = QueueFull if message.code is ErrorCode.QUEUE_FULL else RequestRejected
            request.fail(kind(message.message, request_id=request.request_id, code=message.code))
            self.release(request)

    def _answer_call(self, call_id: int, answer: AnyResult | Exception) -> None:
        future = self._calls.get(call_id)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _count_report(self, report: ErrorMessage) -> None:
        """A request that is answered with errors only is not sent for ever."""
        for request in self.requests.in_flight(self):
            request.num_reports += 1
            if request.num_reports >= _MAX_REPORTS:
                request.fail(
                    RequestRejected(
                        f"the engine reported {_MAX_REPORTS} errors in a row and nothing of this "
                        f"request, the last: {report.message}",
                        request_id=request.request_id,
                        code=ErrorCode.MALFORMED_MESSAGE,
                    )
                )

    def _on_loss(self, reason: str) -> bool:
        self.is_draining = self.is_paused = False
        self._fail_calls(self._died(f"is gone: {reason}"))
        if self._neighbours is not None and self.arithmetic is not None:
            self._neighbours.on_lost(self, self.arithmetic)
        return bool(self.requests.in_flight(self))

    def _on_attempt_over(self) -> None:
        if self._neighbours is not None and self.is_connected:
            self._neighbours.on_connected(self)

    def _on_welcome(self, welcome: Welcome) -> None:
        model = welcome.model
        self._fingerprints.clear()
        self._note_weights(welcome.engine_id, model.weights_version, model.fingerprint)
        self.adapters = _by_name(model.adapters)

    async def _recover(self) -> None:
        assert self.welcome is not None
        (engine_id, fingerprint), arithmetic = self._weights, self.arithmetic
        before = self.welcome.model
        try:
            await self._reconnect()
        except EngineClientError as error:
            self._fail_all(error)
            raise
        # an engine that was not restarted carries on with what it has been given meanwhile
        is_new = engine_id != self._weights[0]
        is_other = is_new and fingerprint != self._weights[1]
        model = self.welcome.model
        counts_otherwise = is_new and model.numerics != before.numerics
        may_begin = self._neighbours is not None and model.tokenizer == before.tokenizer
        if (is_other or counts_otherwise) and self._neighbours is not None and arithmetic:
            self._neighbours.on_lost(self, arithmetic)
        for request in self.requests.drop_wire_ids(self):
            if is_other and (request.has_started or not may_begin):
                request.fail(
                    self._died(
                        f"came back with another model or other weights ({model.name}, weights "
                        f"version {model.weights_version}); send the request again"
                    )
                )
            elif counts_otherwise and request.has_started:
                theirs, ours = ", ".join(model.numerics), ", ".join(before.numerics)
                request.fail(
                    self._died(
                        f"came back as one whose tokens differ ({theirs}; it was {ours}); send "
                        "the request again"
                    )
                )
            elif not request.finished:
                request.metrics.num_resumptions += 1
                self._send_request(request)

    def _fail_all(self, error: Exception) -> None:
        for request in self.requests.drop_wire_ids(self):
            why = ""
            if isinstance(error, EngineDied) and self._neighbours is not None:
                why = self._neighbours.why_not_moved(self, request)
            request.fail(EngineDied(f"{error}; {why}", address=self._address) if why else error)
        self._fail_calls(error)

    def _fail_calls(self, error: Exception) -> None:
        for call_id in list(self._calls):
            self._answer_call(call_id, error)


def _by_name(adapters: Sequence[AdapterInfo]) -> dict[str, str]:
    return {each.name: each.fingerprint for each in adapters}
