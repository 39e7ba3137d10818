"""What follows the engine's loop, and the parts that features add to it; request timings and step
times among them."""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec

import msgspec

from engine_core.errors import RequestRefused
from engine_core.scheduler import ModelRunnerOutput, Request, SchedulerOutput
from engine_core.scheduler.request import request_of
from engine_core.server.clients import Client
from protocol.base import Message
from protocol.calls import AnyResult, EngineStatistics
from protocol.outputs import EngineCoreOutputs, RequestTimings
from protocol.requests import EngineRequest

logger = logging.getLogger(__name__)

P = ParamSpec("P")

ControlMethod = Literal[
    "set_pause_state",
    "preempt_all",
    "use_weights",
    "forget_runner",
    "reserve_adapter_slot",
    "on_adapter_loaded",
    "drop_adapter",
]
"""A method of the scheduler that a pause, a sleep, new weights or adapters need."""


@dataclasses.dataclass(slots=True)  # one a step: frozen takes a microsecond more
class FinishedStep:
    """A step whose outputs have been sent. Times in seconds of the loop's clock."""

    plan: SchedulerOutput
    output: ModelRunnerOutput
    """Empty if the step failed."""
    planned_s: float
    """When its planning began."""
    collected_s: float
    """When its result was known."""
    sent_s: float
    """When its outputs had been sent."""
    has_outputs: bool


class StepObserver:
    """Base of what follows the loop; does nothing. `now_s` is of the loop's clock."""

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        """A request was accepted."""

    def on_abort(
        self, request_ids: Collection[str], now_s: float, index: int | None = None
    ) -> None:
        """Requests were given up by their client, or only their sample of this index."""

    def on_cache_reset(self, now_s: float) -> None:
        """The prefix cache was emptied on demand."""

    def on_control(
        self, what: ControlMethod, arguments: tuple[str | int, ...], next_step_id: int, now_s: float
    ) -> None:
        """A pause, a sleep or new weights: this method of the scheduler is called."""

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        """A step was planned, and is launched next."""

    def on_outputs(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        """Outputs by client, about to be sent."""

    def on_step(self, step: FinishedStep) -> None:
        """A step is over."""

    def close(self) -> None:
        """The loop is over."""


Reply = Callable[[AnyResult | RequestRefused], None]
"""Sends a client the answer to its call, or as much of it as it may see; once."""
Handler = Callable[[Client, Any, Reply], AnyResult | None]
"""Answers a call. None: it keeps the reply, and answers later. Raises RequestRefused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What a part may ask of the engine's loop.

    Attributes:
        observers: in their order.
        settle: runs one step of a paused scheduler, behind those in flight, to its end.
        abort_all: aborts the requests of all clients.
        note: tells observers what was asked of the scheduler: a method's name and its arguments.
        broadcast: sends a message to every client.
    """

    observers: list[StepObserver]
    progress: "Progress"
    started_s: float
    clock: Callable[[], float]
    settle: Callable[[], None]
    abort_all: Callable[[], None]
    note: Callable[[ControlMethod, tuple[str | int, ...]], None]
    broadcast: Callable[[Message], None]
    statistics: Callable[[], EngineStatistics]


class EnginePart(StepObserver):
    """What one feature adds to the engine beside its scheduler; the base adds nothing."""

    loop: Loop

    def join(self, loop: Loop) -> None:
        """Once, before the loop runs."""
        self.loop = loop

    def handlers(self) -> dict[type, Handler]:
        """The calls that this part answers, by their class in `protocol.calls`."""
        return {}

    @property
    def is_busy(self) -> bool:
        """Whether the loop is to go on, though no request can."""
        return False

    def resolve(self, message: EngineRequest) -> EngineRequest:
        """The request with what this part knows of it. Raises RequestRefused."""
        return message

    def admit(self, message: EngineRequest, request: Request) -> None:
        """The last look before the scheduler takes a request. Raises RequestRefused."""

    def on_departure(self, client: Client) -> None:
        """A client left, and its requests are aborted."""

    def on_applied(self) -> None:
        """All messages that had come have been taken in; a step may follow."""

    def on_drain(self) -> None:
        """A drain has begun: what is unfinished may end now, if it can."""

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        return numbers


def hooks_of(
    observers: Iterable[StepObserver], hook: Callable[Concatenate[Any, P], None]
) -> list[Callable[P, None]]:
    """This method of those that do something in it: a step calls no other."""
    name = hook.__name__
    return [
        getattr(each, name)
        for each in observers
        if getattr(type(each), name) is not getattr(EnginePart, name)
    ]


class RequestLog(StepObserver):
    """A line when a request comes, is aborted, and ends. Ids begin with those of clients."""

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        num_tokens = len(message.prompt_token_ids)
        logger.debug(
            "request %r of client %d: %d tokens", message.request_id, client_index, num_tokens
        )

    def on_abort(
        self, request_ids: Collection[str], now_s: float, index: int | None = None
    ) -> None:
        logger.debug("aborted: %r", sorted(request_ids))

    def on_outputs(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        for per_client in outputs.values():
            for request_id in per_client.finished_req_ids:
                logger.debug("request %r has ended", request_id)


class Progress(StepObserver):
    """The last progress of the loop: a step of tokens that is over, or nothing to do.
    `has_work`: whether a request is unfinished and not held by a pause."""

    def __init__(self, has_work: Callable[[], bool], started_s: float) -> None:
        self._has_work = has_work
        self.last_plans: deque[SchedulerOutput] = deque(maxlen=8)
        self.num_steps = 0
        """Changes with each progress."""
        self.step_id = -1
        """The last step of tokens that is over; -1 before the first."""
        self.at_s = started_s

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        if plan.total_num_scheduled_tokens:
            self.last_plans.append(plan)

    def on_step(self, step: FinishedStep) -> None:
        if step.plan.total_num_scheduled_tokens:
            self.step_id = step.plan.step_id
        elif self._has_work():
            return
        self.num_steps += 1
        self.at_s = step.sent_s


class StepTimes(EnginePart):
    """Sums up the time that steps took; where they overlap it counts once."""

    def __init__(self, started_s: float) -> None:
        self.total_s = 0.0
        self._last_end_s = started_s

    def on_step(self, step: FinishedStep) -> None:
        if step.plan.total_num_scheduled_tokens:
            self.total_s += step.sent_s - max(step.planned_s, self._last_end_s)
            self._last_end_s = step.sent_s

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        return msgspec.structs.replace(numbers, step_time_s=self.total_s)


class CompileStatistics(EnginePart):
    """`num_compilations`: kernels that were compiled while serving."""

    def __init__(self, num_compilations: Callable[[], int]) -> None:
        self._num_compilations = num_compilations

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        return msgspec.structs.replace(
            numbers, num_compilations_after_ready=self._num_compilations()
        )


@dataclasses.dataclass(slots=True)
class _Stages:
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0


class RequestTimes(EnginePart):
    """Each request's stages, as seconds since its arrival, in its last output; and their sums over
    the requests that got a first token."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stages] = {}
        self.num_first_tokens = 0
        self.queue_s = 0.0
        self.ttft_s = 0.0

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        self._stages[message.request_id] = _Stages(now_s)

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        """Note which requests run for the first time, and which were preempted."""
        if not (plan.scheduled_new_reqs or plan.preempted_req_ids):
            return
        for new in plan.scheduled_new_reqs:
            stages = self._stages.get(new.req_id)
            if stages is not None and stages.first_scheduled_s is None:
                stages.first_scheduled_s = now_s - stages.arrival_s
        # A request is preempted as a whole: its sequences count once.
        for request_id in set(map(request_of, plan.preempted_req_ids)):
            if request_id in self._stages:
                self._stages[request_id].num_preemptions += 1

    def on_outputs(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        """Note first tokens, and put the timings into each request's last output, in place. Reads
        the rare outputs only: the columns of `decoded` hold neither first nor last ones."""
        for per_client in outputs.values():
            last: dict[str, int] = {}
            for position, output in enumerate(per_client.other_outputs):
                stages = self._stages.get(output.request_id)
                if stages is None:
                    continue
                if output.new_token_ids and stages.first_token_s is None:
                    stages.first_token_s = now_s - stages.arrival_s
                    self.num_first_tokens += 1
                    self.queue_s += stages.first_scheduled_s or 0.0
                    self.ttft_s += stages.first_token_s
                if output.finished:
                    last[output.request_id] = position
            for request_id in per_client.finished_req_ids:
                stages = self._stages.pop(request_id, None)
                where = last.get(request_id)
                if stages is not None and where is not None:
                    per_client.other_outputs[where] = msgspec.structs.replace(
                        per_client.other_outputs[where],
                        timings=RequestTimings(
                            first_scheduled_s=stages.first_scheduled_s,
                            first_token_s=stages.first_token_s,
                            finished_s=now_s - stages.arrival_s,
                            num_preemptions=stages.num_preemptions,
                        ),
                    )

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        return msgspec.structs.replace(
            numbers,
            num_first_tokens=self.num_first_tokens,
            queue_time_s=self.queue_s,
            ttft_s=self.ttft_s,
        )
