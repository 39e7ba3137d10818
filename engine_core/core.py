"""The engine's loop, on one screen, and what its lines call.

Owns the order of things within a step. Must not know sockets, tokens' meaning, or tensors.
"""

import dataclasses
import logging
import time
from collections.abc import Collection, Sequence
from typing import assert_never

from engine_core.errors import RequestRefused
from engine_core.executor import Executor
from engine_core.lifecycle import Lifecycle, Stage
from engine_core.scheduler import (
    DuplicateRequestId,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from engine_core.scheduler.errors import QueueFull
from engine_core.server.calls import answer_call
from engine_core.server.clients import Client, ClientRegistry
from engine_core.server.inbox import Inbox, Incoming
from engine_core.server.outbox import Outbox
from engine_core.server.validation import RequestValidator
from engine_core.steps_in_flight import CollectedStep, StepsInFlight
from engine_core.timings import RequestClock
from engine_core.trace.writer import TraceWriter
from kernels.compile_counter import CompileCounter
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo
from protocol.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason, Rejected
from protocol.requests import Abort, Call, EngineRequest
from protocol.statistics import EngineStatistics

logger = logging.getLogger(__name__)


class EngineCore:
    """Serves until its lifecycle ends. See docs/architecture.md for a request's way through it.

    Keeps as many steps in flight as scheduler and executor do. Two steps in time, where that is 2:

        host     plan 1, launch | take in 0, send | plan 2, launch | take in 1, send | plan 3 ...
        device   [ step 0 ...        ][ step 1 ...                     ][ step 2 ...
    """

    def __init__(
        self,
        *,
        inbox: Inbox,
        outbox: Outbox,
        clients: ClientRegistry,
        scheduler: Scheduler,
        executor: Executor,
        lifecycle: Lifecycle,
        limits: RequestValidator,
        eos_token_ids: tuple[int, ...],
        recorder: TraceWriter | None = None,
        compilations: CompileCounter | None = None,
    ) -> None:
        self._inbox = inbox
        self._outbox = outbox
        self._clients = clients
        self._scheduler = scheduler
        self._executor = executor
        self._lifecycle = lifecycle
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._recorder = recorder
        self._compilations = compilations or CompileCounter()
        self._clock = RequestClock()
        self._steps = StepsInFlight(
            executor, max_num=scheduler.max_steps_in_flight, discard=scheduler.discard_step
        )
        self._started_s = time.monotonic()
        self._last_end_s = self._started_s
        """When the last step that was taken in was over."""
        self._step_time_s = 0.0

    # ------------------------------------------------------------------ the loop

    def run(self) -> None:
        while not self._stopping():
            self._apply(self._inbox.drain(block=not self._has_work()))
            planned_s = time.monotonic()
            plan = self._scheduler.schedule(now=planned_s)
            self._note_plan(plan, planned_s)
            self._steps.launch(plan, planned_s)
            while self._steps.must_collect:
                step = self._steps.collect()
                ended_s = time.monotonic()
                outputs = self._scheduler.update_from_output(step.plan, step.sampled, now=ended_s)
                self._clock.stamp(outputs.values(), ended_s)
                self._outbox.send(outputs)
                self._note_step(step, ended_s, has_outputs=bool(outputs))

    # ------------------------------------------------------------------ its lines

    def _has_work(self) -> bool:
        """A step in flight is work, also if all its requests have ended."""
        return len(self._steps) > 0 or self._scheduler.has_work()

    def _stopping(self) -> bool:
        self._lifecycle.poll()
        stage = self._lifecycle.stage
        self._outbox.draining = stage is not Stage.SERVING
        if stage is Stage.ABORTING:
            self.end_all(FinishReason.ABORT, "the engine is stopping")
            return True
        return stage is Stage.DRAINING and not self._has_work()

    def _apply(self, incoming: Sequence[Incoming]) -> None:
        for client, message in incoming:
            match message:
                case EngineRequest():
                    self._add_request(client, message)
                case Abort():
                    own = client.request_ids.intersection(message.request_ids)
                    self._abort(own)
                case Call():
                    self._outbox.post(client, answer_call(message, self))
                case _:
                    assert_never(message)
        for client in self._clients.take_departed():
            logger.info("%s left, %d requests dropped", client, len(client.request_ids))
            self._abort(client.request_ids)

    def _abort(self, request_ids: Collection[str]) -> None:
        self._scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        if self._recorder is not None and request_ids:
            self._recorder.aborted(request_ids, time.monotonic())

    def _add_request(self, client: Client, message: EngineRequest) -> None:
        try:
            if self._lifecycle.stage is not Stage.SERVING:
                raise RequestRefused(
                    ErrorCode.DRAINING, "the engine is draining; send the request to another"
                )
            self._limits.check(message)
            request = Request.from_engine_core_request(
                message,
                client_index=client.index,
                arrival_time=time.monotonic(),
                eos_token_ids=self._eos_token_ids,
            )
            self._scheduler.add_request(request)
            self._clock.arrived(request.request_id, request.arrival_time)
            client.request_ids.add(message.request_id)
            if self._recorder is not None:
                self._recorder.arrived(message, request.arrival_time, client_index=client.index)
        except QueueFull as error:
            self._reject(client, message, ErrorCode.QUEUE_FULL, str(error))
        except DuplicateRequestId as error:
            self._reject(client, message, ErrorCode.DUPLICATE_REQUEST_ID, str(error))
        except RequestRefused as error:
            self._reject(client, message, error.code, str(error))
        except ValueError as error:
            self._reject(client, message, ErrorCode.INVALID_REQUEST, str(error))

    def _reject(self, client: Client, message: EngineRequest, code: ErrorCode, why: str) -> None:
        logger.info("rejected request %r of %s: %s", message.request_id, client, why)
        self._outbox.post(client, Rejected(request_id=message.request_id, code=code, message=why))

    def _note_plan(self, plan: SchedulerOutput, planned_s: float) -> None:
        self._clock.planned(plan, planned_s)
        if self._recorder is None or self._steps.max_num == 1:
            return  # with one step at a time its line in the record says it all
        if plan.total_num_scheduled_tokens or len(self._steps):
            self._recorder.planned(plan, planned_s)

    def _note_step(self, step: CollectedStep, ended_s: float, *, has_outputs: bool) -> None:
        plan, began_s = step.plan, max(step.planned_s, self._last_end_s)
        has_tokens = plan.total_num_scheduled_tokens > 0
        if has_tokens:
            self._last_end_s = time.monotonic()
            self._step_time_s += self._last_end_s - began_s
        recorder = self._recorder
        if recorder is not None and (has_tokens or has_outputs or recorder.is_planned(plan)):
            recorder.step(plan, step.sampled, step.planned_s, ended_s - step.planned_s)

    # ------------------------------------------------------------------ for calls and shutdown

    def end_all(self, reason: FinishReason, why: str) -> None:
        """The loop is over: every live request gets one terminal output, for all its sequences.

        Past the scheduler, which may be what failed.
        """
        outputs = {
            client.index: EngineCoreOutputs(
                other_outputs=[
                    EngineCoreOutput(
                        request_id=request_id, new_token_ids=[], finish_reason=reason, detail=why
                    )
                    for request_id in sorted(client.request_ids)
                ],
                finished_req_ids=sorted(client.request_ids),
            )
            for client in self._clients
            if client.request_ids
        }
        self._clock.stamp(outputs.values(), time.monotonic())
        self._outbox.send(outputs)

    def close(self) -> None:
        """Behind the loop: nothing runs any more, and what was recorded is complete on disk."""
        self._steps.wait()
        if self._recorder is not None:
            self._recorder.close()

    def reset_prefix_cache(self) -> int:
        """Returns how many cached blocks were forgotten."""
        if self._recorder is not None:
            self._recorder.cache_reset(time.monotonic())
        return self._scheduler.reset_prefix_cache()

    def drain(self, why: str) -> int:
        """Begin a drain. Returns how many requests are left."""
        self._lifecycle.drain(why)
        return sum(self._scheduler.get_request_counts())

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._started_s

    def explain(self, request_id: str) -> RequestInfo | None:
        """Why a request is where it is; None if it is not known, or not any more."""
        return self._scheduler.explain(request_id)

    def live_request_ids(self) -> list[str]:
        """Of all clients."""
        return [name for client in self._clients for name in sorted(client.request_ids)]

    def statistics(self) -> EngineStatistics:
        now = self._scheduler.statistics()
        numbers = {field.name: getattr(now, field.name) for field in dataclasses.fields(now)}
        numbers["num_finished"] = {
            reason.value: count for reason, count in now.num_finished.items()
        }
        return EngineStatistics(
            **numbers,
            uptime_s=self.uptime_s,
            num_clients=len(self._clients),
            step_time_s=self._step_time_s,
            model_time_s=self._executor.model_time_s,
            num_compilations_after_ready=self._compilations.num_after_ready,
        )
