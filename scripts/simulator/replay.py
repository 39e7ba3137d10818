"""A recorded production run, decided again: the same arrivals between the same steps, the same
sampled tokens; each step's plan is compared with the recorded one.

Steps in which nothing ran and nobody was told anything are not recorded; their numbers are missing.
They are planned here too: before what arrived next if the scheduler had no work then, else after.
Where steps were in flight, a line of its own says when each was planned.
"""

import dataclasses
from typing import Any

import numpy as np

from engine_core.scheduler import (
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerError,
    SchedulerOutput,
)
from engine_core.trace.reader import (
    Aborted,
    Arrived,
    CacheReset,
    Event,
    Planned,
    Step,
    prompt_tokens,
)
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from scripts.simulator.errors import SimulationError
from scripts.simulator.records import RunRecord


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    step_id: int
    what: str
    recorded: Any
    decided: Any

    def __str__(self) -> str:
        return (
            f"step {self.step_id}: {self.what} differ\n"
            f"  recorded  {_shortened(self.recorded)}\n"
            f"  decided   {_shortened(self.decided)}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    num_steps: int
    """Compared, and equal."""
    num_requests: int
    difference: Difference | None


def verify(record: RunRecord) -> Verification:
    """Up to the first difference.

    Raises:
        SimulationError: a record that cannot be replayed.
    """
    replay = _Replay(record)
    num_steps = num_requests = 0
    between: list[Event] = []
    for event in record.events():
        if not isinstance(event, Planned | Step):
            between.append(event)
            continue
        difference = replay.go_on(between, event)
        num_requests += sum(isinstance(one, Arrived) for one in between)
        if difference is not None:
            return Verification(num_steps, num_requests, difference)
        num_steps += isinstance(event, Step)
        between = []
    return Verification(num_steps, num_requests, None)


class _Replay:
    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._scheduler = Scheduler(record.scheduler_config(), record.cache())
        self._next_step_id: int | None = None
        self._now_s = 0.0
        self._plans: dict[int, SchedulerOutput] = {}
        """Of the steps in flight, by the recorded number."""

    def go_on(self, between: list[Event], event: Planned | Step) -> Difference | None:
        """What came before an event of a step, then that event."""
        if event.id in self._plans:
            difference = self._apply_all(between, event.id)
        else:
            start_s = event.at_s if isinstance(event, Planned) else event.start_s
            difference = self._plan(between, event.id, start_s)
        if difference is not None or isinstance(event, Planned):
            return difference
        return self._take_in(event)

    def _plan(self, between: list[Event], step_id: int, start_s: float) -> Difference | None:
        if self._next_step_id is None:
            self._next_step_id = step_id  # recording may begin late, deciding begins at 0
        num_missing = step_id - self._next_step_id
        if num_missing and not self._scheduler.has_work():
            self._empty_steps(num_missing)
            num_missing = 0
        difference = self._apply_all(between, step_id)
        if difference is None:
            self._empty_steps(num_missing)
            self._plans[step_id] = self._scheduler.schedule(now=start_s)
            self._next_step_id = step_id + 1
        return difference

    def _take_in(self, step: Step) -> Difference | None:
        plan = self._plans.pop(step.id)
        difference = _compare(step, plan)
        if difference is not None:
            return difference
        self._now_s = step.start_s + step.duration_s
        if step.was_discarded:
            self._scheduler.discard_step(plan, "the step failed")
        self._scheduler.update_from_output(plan, step.model_output(), now=self._now_s)
        return None

    def _empty_steps(self, count: int) -> None:
        for _ in range(count):
            plan = self._scheduler.schedule(now=self._now_s)
            ids = plan.batch.req_ids
            nothing = ModelRunnerOutput(req_ids=ids, sampled_token_ids=np.zeros(len(ids), np.int32))
            self._scheduler.update_from_output(plan, nothing, now=self._now_s)

    def _apply_all(self, events: list[Event], step_id: int) -> Difference | None:
        for event in events:
            difference = self._apply(event, step_id)
            if difference is not None:
                return difference
        return None

    def _apply(self, event: Event, step_id: int) -> Difference | None:
        match event:
            case Arrived():
                try:
                    self._scheduler.add_request(self._request(event))
                except (SchedulerError, ValueError) as error:
                    return Difference(step_id, f"arrivals ({event.id})", "taken", str(error))
            case Aborted():
                self._scheduler.finish_requests(event.ids, RequestStatus.FINISHED_ABORTED)
            case CacheReset():
                self._scheduler.reset_prefix_cache()
            case Planned() | Step():
                raise AssertionError("steps are not applied")
        return None

    def _request(self, arrived: Arrived) -> Request:
        eos_token_ids = self._record.eos_token_ids
        if eos_token_ids is None and not arrived.ignore_eos:
            raise SimulationError(
                f"{self._record.path}: request {arrived.id!r} may stop at an end-of-sequence "
                "token, and the first line names none (eos_token_ids); record the run again"
            )
        params = SamplingParams(
            max_tokens=arrived.max_tokens,
            min_tokens=arrived.min_tokens,
            temperature=0.0 if arrived.beam_search is not None else 1.0,
            ignore_eos=arrived.ignore_eos,
            stop_token_ids=tuple(arrived.stop_token_ids),
        )
        message = EngineRequest(
            request_id=arrived.id,
            prompt_token_ids=prompt_tokens(arrived, self._record.block_size, 2**31 - 1),
            sampling_params=params,
            output_token_ids=arrived.output_token_ids,
            num_sequences=arrived.num_sequences,
            beam_search=arrived.beam_search,
            priority=arrived.priority,
            tenant=arrived.tenant,
            cache_salt=arrived.salt,
            adapter=arrived.adapter,
        )
        return Request.from_engine_core_request(
            message,
            client_index=arrived.client_index,
            arrival_time=arrived.at_s,
            eos_token_ids=eos_token_ids or (),
        )


def _compare(step: Step, plan: SchedulerOutput) -> Difference | None:
    batch, copies = plan.batch, plan.copies
    pairs: dict[str, tuple[Any, Any]] = {
        "preempted requests": (step.preempted, plan.preempted_req_ids),
        "sequences": (step.sequences, batch.req_ids),
        "scheduled tokens": (step.nums, batch.num_scheduled_tokens.tolist()),
        "computed tokens": (step.context, batch.num_computed_tokens.tolist()),
        "new sequences": (step.new, [new.req_id for new in plan.scheduled_new_reqs]),
        "resumed sequences": (step.resumed, [again.req_id for again in plan.resumed_reqs]),
        "finished sequences": (step.finished, plan.finished_req_ids),
        "numbers of copies": (
            list(step.copies),
            [len(copies.swap_in), len(copies.swap_out), len(copies.copy)],
        ),
    }
    for what, (recorded, decided) in pairs.items():
        if recorded != decided:
            return Difference(step.id, what, *_where_they_part(recorded, decided))
    return None


def _where_they_part(recorded: list[Any], decided: list[Any]) -> tuple[list[Any], list[Any]]:
    """Both from a little before their first difference on."""
    same = 0
    while same < min(len(recorded), len(decided)) and recorded[same] == decided[same]:
        same += 1
    start = max(0, same - 2)
    return recorded[start:], decided[start:]


def _shortened(values: list[Any]) -> str:
    text = ", ".join(map(str, values[:8])) or "none"
    return f"{text}, ... ({len(values)})" if len(values) > 8 else text
