"""Replay of a step trace: the same arrivals between the same steps, the same sampled tokens; each
step's plan is compared with the recorded one.
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
from engine_core.trace import (
    TraceAbort,
    TraceArrival,
    TraceCacheReset,
    TraceEvent,
    TracePlan,
    TraceStep,
)
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from scripts.simulator import SimulationError
from scripts.simulator.step_trace import StepTrace


class Difference(Exception):
    """The first decision that is not the recorded one."""

    def __init__(self, step_id: int, what: str, recorded: list[Any], decided: list[Any]) -> None:
        self.step_id, self.what = step_id, what
        same = 0
        while recorded[same : same + 1] == decided[same : same + 1]:
            same += 1
        start = max(0, same - 2)
        self.recorded, self.decided = recorded[start:], decided[start:]
        super().__init__(
            f"step {step_id}: {what} differ\n"
            f"  recorded  {_shortened(self.recorded)}\n"
            f"  decided   {_shortened(self.decided)}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    num_steps: int
    """Compared, and equal."""
    num_requests: int
    difference: Difference | None


def verify(trace: StepTrace) -> Verification:
    """Up to the first difference."""
    replay, difference = _Replay(trace), None
    try:
        replay.run()
    except Difference as found:
        difference = found
    return Verification(replay.num_steps, replay.num_requests, difference)


class _Replay:
    """Steps without sequences and outputs are not in a trace; their ids are missing. They are
    planned here too: before the next arrivals if the scheduler had no work then, else after them.
    Where steps were in flight, a TracePlan event says when each was planned."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self._eos_token_ids: list[int] | None = trace.settings.get("eos_token_ids")
        self._scheduler = Scheduler(trace.scheduler_config(), trace.make_cache())
        self._next_step_id: int | None = None
        self._now_s = 0.0
        self._plans: dict[int, SchedulerOutput] = {}
        """Of the steps in flight, by the recorded id."""
        self.num_steps = self.num_requests = 0

    def run(self) -> None:
        """
        Raises:
            Difference: with the scheduler's decisions.
        """
        between: list[TraceEvent] = []
        for event in self._trace.events():
            if not isinstance(event, TracePlan | TraceStep):
                between.append(event)
                continue
            if event.id in self._plans:
                self._apply(between, event.id)
            else:
                start_s = event.at_s if isinstance(event, TracePlan) else event.start_s
                self._plan(between, event.id, start_s)
            if isinstance(event, TraceStep):
                self._update(event)
            between = []

    def _plan(self, between: list[TraceEvent], step_id: int, start_s: float) -> None:
        if self._next_step_id is None:
            self._next_step_id = step_id  # a trace may begin late
        num_missing = step_id - self._next_step_id
        if not self._scheduler.has_work():
            self._empty_steps(num_missing)
            num_missing = 0
        self._apply(between, step_id)
        self._empty_steps(num_missing)
        self._plans[step_id] = self._scheduler.schedule(now=start_s)
        self._next_step_id = step_id + 1

    def _update(self, step: TraceStep) -> None:
        plan = self._plans.pop(step.id)
        _compare(step, plan)
        self.num_steps += 1
        self._now_s = step.start_s + step.duration_s
        if step.was_discarded:
            self._scheduler.discard_step(plan, "the step failed")
        self._scheduler.update_from_output(plan, step.model_output(), now=self._now_s)

    def _empty_steps(self, count: int) -> None:
        for _ in range(count):
            plan = self._scheduler.schedule(now=self._now_s)
            ids = plan.batch.req_ids
            nothing = ModelRunnerOutput(req_ids=ids, sampled_token_ids=np.zeros(len(ids), np.int32))
            self._scheduler.update_from_output(plan, nothing, now=self._now_s)

    def _apply(self, events: list[TraceEvent], step_id: int) -> None:
        for event in events:
            match event:
                case TraceArrival():
                    self.num_requests += 1
                    try:
                        self._scheduler.add_request(self._request(event))
                    except (SchedulerError, ValueError) as error:
                        what = f"arrivals ({event.id})"
                        raise Difference(step_id, what, ["accepted"], [str(error)]) from None
                case TraceAbort():
                    self._scheduler.finish_requests(event.ids, RequestStatus.FINISHED_ABORTED)
                case TraceCacheReset():
                    self._scheduler.reset_prefix_cache()

    def _request(self, arrived: TraceArrival) -> Request:
        if self._eos_token_ids is None and not arrived.ignore_eos:
            raise SimulationError(
                f"{self._trace.path}: request {arrived.id!r} may stop at an end-of-sequence "
                "token, and the first line names none (eos_token_ids); trace the run again"
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
            prompt_token_ids=arrived.prompt,
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
            eos_token_ids=self._eos_token_ids or (),
        )


def _compare(step: TraceStep, plan: SchedulerOutput) -> None:
    batch, copies = plan.batch, plan.copies
    num_copies = [len(copies.swap_in), len(copies.swap_out), len(copies.copy)]
    for what, recorded, decided in (
        ("preempted requests", step.preempted, plan.preempted_req_ids),
        ("sequences", step.sequences, batch.req_ids),
        ("scheduled tokens", step.nums, batch.num_scheduled_tokens.tolist()),
        ("computed tokens", step.context, batch.num_computed_tokens.tolist()),
        ("new sequences", step.new, [new.req_id for new in plan.scheduled_new_reqs]),
        ("resumed sequences", step.resumed, [resumed.req_id for resumed in plan.resumed_reqs]),
        ("finished sequences", step.finished, plan.finished_req_ids),
        ("numbers of copies", list(step.copies), num_copies),
    ):
        if recorded != decided:
            raise Difference(step.id, what, recorded, decided)


def _shortened(values: list[Any]) -> str:
    text = ", ".join(map(str, values[:8])) or "none"
    return f"{text}, ... ({len(values)})" if len(values) > 8 else text
