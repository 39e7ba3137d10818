"""The engine's loop, on one screen, and what its lines call."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import assert_never

import msgspec

from engine_core.errors import RequestRefused
from engine_core.executor import InProcessExecutor
from engine_core.lifecycle import Lifecycle, LifecycleStage
from engine_core.observers.base import (
    ControlMethod,
    EnginePart,
    Handler,
    Loop,
    Progress,
    RequestTimes,
    StepObserver,
    StepTimes,
    hooks_of,
)
from engine_core.scheduler import (
    DuplicateRequestId,
    PauseState,
    QueueFull,
    Request,
    RequestStatus,
    Scheduler,
)
from engine_core.server.access import permitted_answer, permitted_part
from engine_core.server.clients import Client
from engine_core.server.inbox import Inbox, Incoming
from engine_core.server.limited_log import LimitedLog
from engine_core.server.outbox import Outbox
from engine_core.server.request_reader import RequestReader
from engine_core.steps import Steps
from protocol import calls
from protocol.base import Message
from protocol.errors import ErrorCode
from protocol.outputs import (
    CallFailed,
    CallResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Rejected,
)
from protocol.requests import Abort, Call, EngineRequest

logger = logging.getLogger(__name__)


class EngineCore:
    """Serves until its lifecycle ends. docs/internals/architecture.md follows a request through it.

    Args:
        parts: the features of this engine, in the order in which they see requests and steps. The
            calls that a client may make are those that they answer.
        clock: seconds; the same one that inbox, outbox, executor and lifecycle go by.
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        outbox: Outbox,
        scheduler: Scheduler,
        executor: InProcessExecutor,
        lifecycle: Lifecycle,
        reader: RequestReader,
        parts: Sequence[StepObserver] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._clients = outbox.clients
        self._scheduler = scheduler
        self._executor = executor
        self._lifecycle = lifecycle
        self._reader = reader
        self._clock = clock
        self._client_log = LimitedLog(logger, logging.INFO, clock)
        self._started_s = clock()
        self._has_resumed = False
        """Set once the parts have been told of a drain."""
        self.progress = Progress(self._may_progress, self._started_s)
        self._observers = [
            RequestTimes(),
            StepTimes(self._started_s),
            self.progress,
            *parts,
        ]
        self._parts = [each for each in self._observers if isinstance(each, EnginePart)]
        self._on_applied = hooks_of(self._parts, EnginePart.on_applied)
        self._steps = Steps(scheduler, executor, outbox, self._observers, clock)
        loop = Loop(
            observers=self._observers,
            progress=self.progress,
            started_s=self._started_s,
            clock=clock,
            settle=self._steps.settle,
            abort_all=self._abort_all,
            note=self._note_control,
            broadcast=self._broadcast,
            statistics=self.statistics,
        )
        self._handlers: dict[type, Handler] = {}
        for part in self._parts:
            part.join(loop)
            self._handlers.update(part.handlers())

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        while not self._stopping():
            self._apply(self._inbox.drain(block=not self._may_progress()))
            self._steps.launch()
            while (step := self._steps.to_collect()) is not None:
                self._steps.complete(step)
        self._apply(self._inbox.drain(block=False))  # what came last is refused, not left unread

    # ------------------------------------------------------------------ its lines

    def _stopping(self) -> bool:
        self._lifecycle.poll()
        stage = self._lifecycle.stage
        self._outbox.tell_state(
            draining=stage is not LifecycleStage.SERVING,
            paused=self._scheduler.pause_state is not PauseState.UNPAUSED,
        )
        if stage is LifecycleStage.ABORTING:
            self.end_all(FinishReason.ABORT, "the engine is stopping")
            return True
        if stage is LifecycleStage.DRAINING and not self._has_work():
            return True
        if stage is LifecycleStage.DRAINING and not self._has_resumed:
            self._has_resumed = True
            for part in self._parts:
                part.on_drain()
        return False

    def _has_work(self) -> bool:
        """A step in flight is work, also if all its requests have ended."""
        return bool(self._scheduler.in_flight) or self._scheduler.has_work()

    def _may_progress(self) -> bool:
        """Whether there is work that does not wait for the end of a pause."""
        if self._scheduler.in_flight or self._scheduler.may_progress():
            return True
        return any(part.is_busy for part in self._parts)

    def _apply(self, incoming: Iterable[Incoming]) -> None:
        for client, message in incoming:
            match message:
                case EngineRequest():
                    self._add_request(client, message)
                case Abort():
                    self._end(client, message)
                case Call():
                    self._answer(client, message)
                case _:
                    assert_never(message)
        for client in self._clients.take_departed():
            num_requests = len(client.request_ids)
            self._client_log.log("left", f"{client!s:.100} left, {num_requests} requests dropped")
            self._abort(client.request_ids)
            for part in self._parts:
                part.on_departure(client)
        for notify in self._on_applied:
            notify()

    def _answer(self, client: Client, message: Call) -> None:
        """A fault of one call is its answer, and the loop goes on; but one of a call that changes
        the engine ends it: in which state the change has left it is not known."""
        try:
            answer = permitted_answer(client, message, partial(self._handle, client))
            if answer is not None:
                self._outbox.post(client, answer)
        except Exception:
            if isinstance(message.call, calls.ADMIN_CALLS):
                raise
            why = self._inbox.refuse_unanswerable(client, type(message.call).__name__)
            failed = CallFailed(call_id=message.call_id, code=ErrorCode.INTERNAL, message=why)
            self._outbox.post(client, failed)

    def _handle(self, client: Client, message: Call) -> CallResult | CallFailed | None:
        """The answer of the part whose call this is. None: it answers later."""

        def reply(result: calls.AnyResult | RequestRefused) -> None:
            answer = _answer_to(message, result)
            self._outbox.post(client, permitted_part(client, message, answer))

        try:
            result = self._handlers[type(message.call)](client, message.call, reply)
        except RequestRefused as error:
            return _answer_to(message, error)
        return None if result is None else _answer_to(message, result)

    def _add_request(self, client: Client, message: EngineRequest) -> None:
        now_s, is_read = self._clock(), False
        try:
            if self._lifecycle.stage is not LifecycleStage.SERVING:
                raise RequestRefused(
                    ErrorCode.DRAINING, "the engine is draining; send the request to another"
                )
            message, request = self._read_request(client, message, now_s)
            is_read = True
            self._scheduler.add_request(request)
        except QueueFull as error:
            self._reject(client, message, ErrorCode.QUEUE_FULL, str(error))
        except DuplicateRequestId as error:
            self._reject(client, message, ErrorCode.DUPLICATE_REQUEST_ID, str(error))
        except RequestRefused as error:
            self._reject(client, message, error.code, str(error))
        except ValueError as error:
            self._reject(client, message, ErrorCode.INVALID_REQUEST, str(error))
        except Exception:
            if is_read:  # the scheduler's books may be wrong
                raise
            why = self._inbox.refuse_unanswerable(client, f"request {message.request_id!r:.100}")
            self._reject(client, message, ErrorCode.INTERNAL, why)
        else:
            client.request_ids.add(message.request_id)
            for observer in self._observers:
                observer.on_arrival(message, client.index, now_s)

    def _read_request(
        self, client: Client, message: EngineRequest, now_s: float
    ) -> tuple[EngineRequest, Request]:
        """The request as it is noted, and as it is scheduled. The scheduler knows nothing of it.
        Raises RequestRefused, ValueError: it cannot be served."""
        self._reader.check(message)
        for part in self._parts:
            message = part.resolve(message)
        message, request = self._reader.read(client, message, now_s)
        for part in self._parts:
            part.admit(message, request)
        return message, request

    def _reject(self, client: Client, message: EngineRequest, code: ErrorCode, why: str) -> None:
        name = f"{message.request_id!r:.100} of {client!s:.100}"
        self._client_log.log(code, f"rejected request {name}: {why}")
        self._outbox.post(client, Rejected(request_id=message.request_id, code=code, message=why))

    def _end(self, client: Client, asked: Abort) -> None:
        status = RequestStatus.FINISHED_ABORTED
        if asked.are_complete:
            status = RequestStatus.FINISHED_STOPPED
        self._abort(client.request_ids.intersection(asked.request_ids), status)
        for request_id, index in asked.samples:
            if request_id in client.request_ids:
                self._scheduler.finish_sample(request_id, index, status)
                for observer in self._observers:
                    observer.on_abort((request_id,), self._clock(), index)

    def _abort(
        self,
        request_ids: Collection[str],
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
    ) -> None:
        if request_ids:
            self._scheduler.finish_requests(request_ids, status)
            for observer in self._observers:
                observer.on_abort(request_ids, self._clock())

    # ------------------------------------------------------------------ for parts and shutdown

    def end_all(self, reason: FinishReason, why: str) -> None:
        """The loop is over: every unfinished request gets one terminal output, for all its
        sequences, without the scheduler, which may be what failed."""
        outputs = {
            client.index: EngineCoreOutputs(
                other_outputs=[
                    EngineCoreOutput(
                        request_id=request_id, new_token_ids=[], finish_reason=reason, detail=why
                    )
                    for request_id in sorted(client.request_ids)
                ],
                finished_req_ids=sorted(client.request_ids),
                engine_ends=True,
            )
            for client in self._clients
            if client.request_ids
        }
        self._steps.send(outputs, self._clock())

    def close(self) -> None:
        """Shut down after the loop: nothing runs any more, what could be sent is, and a trace is
        complete on disk."""
        self._outbox.close()
        self._executor.close()
        for observer in self._observers:
            observer.close()

    def statistics(self) -> calls.EngineStatistics:
        numbers = self._executor.add_statistics(self._scheduler.statistics())
        for part in self._parts:
            numbers = part.add_statistics(numbers)
        return msgspec.structs.replace(
            numbers,
            uptime_s=self._clock() - self._started_s,
            num_clients=len(self._clients),
            num_refused_messages=self._inbox.num_refused_messages,
        )

    def _abort_all(self) -> None:
        for client in self._clients:
            self._abort(client.request_ids)

    def _broadcast(self, message: Message) -> None:
        for client in self._clients:
            self._outbox.post(client, message)

    def _note_control(self, what: ControlMethod, arguments: tuple[str | int, ...]) -> None:
        for observer in self._observers:
            observer.on_control(what, arguments, self._scheduler.next_step_id, self._clock())


def _answer_to(message: Call, result: calls.AnyResult | RequestRefused) -> CallResult | CallFailed:
    if isinstance(result, RequestRefused):
        return CallFailed(call_id=message.call_id, code=result.code, message=str(result))
    return CallResult(call_id=message.call_id, result=result)
