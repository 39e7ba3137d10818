"""Traced runs once more: `verify` replays arrivals and sampled tokens and compares each step's plan
with the recorded one; `validate` simulates its arrivals and compares throughput, TTFT, TPOT."""

import dataclasses
from array import array
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine_core.observers.trace_lines import (
    TraceAbort,
    TraceArrival,
    TraceCacheReset,
    TraceControl,
    TraceEvent,
    TracePlan,
    TraceStep,
)
from engine_core.pooler_config import PoolerConfig
from engine_core.scheduler import (
    ModelRunnerOutput,
    PauseState,
    Request,
    RequestStatus,
    SchedulerError,
    SchedulerOutput,
)
from engine_core.scheduler.records.prompt_report import PromptReport
from engine_core.scheduler.rules.adapters import AdapterSlots
from engine_core.startup.scheduler import build_scheduler
from frontend.load.traces.trace import TraceRequest
from frontend.simulator import SimulationError
from frontend.simulator.engine import SimulatedEngine
from frontend.simulator.fleet import Fleet, round_robin
from frontend.simulator.metrics import RequestMetrics
from frontend.simulator.step_times import FittedModel, NoisyModel
from frontend.simulator.step_trace import StepTrace
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams


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


def verify(trace: StepTrace) -> "Replay":
    """Up to the first difference."""
    replay = Replay(trace)
    try:
        replay.run()
    except Difference as found:
        replay.difference = found
    return replay


class Replay:
    """`num_steps` were compared, and equal up to the `difference`, if there is one.

    Steps without sequences and outputs are not in a trace; their ids are missing. They are
    planned here too: before the next arrivals if the scheduler had no work then, else after them.
    Where steps were in flight, a TracePlan event says when each was planned."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        pooler = trace.settings.get("pooler")
        self._pooler = None if pooler is None else msgspec.convert(pooler, PoolerConfig)
        self._eos_token_ids: list[int] | None = trace.settings.get("eos_token_ids")
        self._scheduler = build_scheduler(trace.scheduler_config(), trace.make_cache())
        self._slots = self._scheduler.parts.find(AdapterSlots)
        self._next_step_id: int | None = None
        self._now_s = 0.0
        self._plans: dict[int, SchedulerOutput] = {}
        """Plans of the steps in flight, by the recorded id."""
        self.num_steps = self.num_requests = 0
        self.difference: Difference | None = None

    def run(self) -> None:
        """Raises Difference: with the scheduler's decisions."""
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
        if not self._scheduler.has_work():
            self._empty_steps_before(step_id)
        self._apply(between, step_id)
        self._empty_steps_before(step_id)
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

    def _empty_steps_before(self, step_id: int) -> None:
        assert self._next_step_id is not None
        while self._next_step_id < step_id:
            self._next_step_id += 1
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
                case TraceAbort(index=None):
                    self._scheduler.finish_requests(event.ids, RequestStatus.FINISHED_ABORTED)
                case TraceAbort(index=int(index)):
                    for name in event.ids:
                        self._scheduler.finish_sample(name, index, RequestStatus.FINISHED_ABORTED)
                case TraceControl():
                    self._empty_steps_before(event.next_step)  # of a pause
                    self._control(event)
                case TraceCacheReset():
                    self._scheduler.reset_prefix_cache()

    def _control(self, event: TraceControl) -> None:
        match event.what, event.arguments:
            case "set_pause_state", [str(state), str(why)]:
                self._scheduler.set_pause_state(PauseState[state], why)
            case "preempt_all", [str(why)]:
                self._scheduler.preempt_all(why)
            case "use_weights", [str(name), int(version)]:
                self._scheduler.use_weights(name, version)
            case "forget_runner", []:
                self._scheduler.forget_runner()
            case "reserve_adapter_slot", [str(adapter)]:
                self._slots.reserve(adapter)
            case "on_adapter_loaded", [str(adapter)]:
                self._slots.on_loaded(adapter)
            case "drop_adapter", [str(adapter)]:
                self._slots.drop(adapter)
            case _:
                raise SimulationError(f"{self._trace.path}: no control event: {event}")

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
            timeout_s=arrived.timeout_s,
            pooling_params=arrived.pooling_params,
            is_resumed=True,  # whatever the queue held, this request was taken
        )
        return Request(
            message,
            client_index=arrived.client_index,
            arrival_time=arrived.at_s,
            eos_token_ids=self._eos_token_ids or (),
            report=PromptReport.of(message, self._pooler),
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


# ---------------------------------------------------------------------- validation


_AT_ONCE_S = 0.005
"""A request that was taken this soon after a step's end arrived while the step ran."""


@dataclasses.dataclass(frozen=True, slots=True)
class TracedRequest(TraceRequest):
    """A request with the very tokens that it had."""

    token_ids: tuple[int, ...] = ()

    def prompt(self) -> "array[int]":
        return array("I", self.token_ids)


@dataclasses.dataclass(slots=True)
class _Served:
    arrived: TraceArrival
    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    num_computed: int = 0


def validate(trace: StepTrace, model: FittedModel) -> dict[str, Any]:
    """The document. Steps deviate as they did where the model was fitted: what waits in a queue
    depends on it."""
    served, end_s = _served(trace)
    done = [one for one in served if one.first_token_s is not None]
    if not done:
        raise SimulationError(f"{trace.path} holds no request that got a token; trace more")
    start_s = min(one.arrival_s for one in done)
    requests = [
        TracedRequest(
            index=index,
            arrival_s=one.arrival_s - start_s,
            num_text_tokens=one.arrived.num_prompt_tokens,
            # the last token is sampled and never computed
            num_output_tokens=one.num_computed - one.arrived.num_prompt_tokens + 1,
            tenant=one.arrived.tenant,
            priority=one.arrived.priority,
            token_ids=tuple(one.arrived.prompt),
        )
        for index, one in enumerate(done)
    ]
    metrics = RequestMetrics()
    steps = NoisyModel(model, seed=0)
    engine = SimulatedEngine(trace.scheduler_config(), trace.make_cache(), steps, metrics)
    fleet = Fleet([engine], round_robin())
    fleet.run(requests)
    num_output = sum(request.num_output_tokens for request in requests)
    ttfts_s, tpots_s = np.array(
        [
            (
                one.first_token_s - one.arrival_s,
                (one.last_token_s - one.first_token_s) / max(1, request.num_output_tokens - 1),
            )
            for one, request in zip(done, requests, strict=True)
            if one.first_token_s is not None
        ]
    ).T
    several = np.array([request.num_output_tokens > 1 for request in requests])
    recorded = _figures(ttfts_s, tpots_s[several], num_output, end_s - start_s)
    simulated = _figures(
        metrics.latencies("ttft"),
        metrics.latencies("tpot"),
        metrics.num_output_tokens,
        fleet.finished_s,
    )
    return {
        "step_trace": str(trace.path),
        "num_requests": len(done),
        "num_left_out": len(served) - len(done),
        "step_model": steps.describe(),
        "recorded": recorded,
        "simulated": simulated,
        "simulated_to_recorded": {name: simulated[name] / recorded[name] for name in recorded},
    }


def as_table(document: dict[str, Any]) -> str:
    recorded, simulated = document["recorded"], document["simulated"]
    lines = [
        f"{document['num_requests']} requests of {document['step_trace']}",
        f"{'':<28}{'recorded':>12}{'simulated':>12}{'ratio':>8}",
    ]
    lines += [
        f"{name:<28}{recorded[name]:>12.3f}{simulated[name]:>12.3f}{ratio:>8.3f}"
        for name, ratio in document["simulated_to_recorded"].items()
    ]
    return "\n".join(lines)


def _figures(
    ttfts_s: npt.NDArray[np.float64],
    tpots_s: npt.NDArray[np.float64],
    num_output_tokens: int,
    duration_s: float,
) -> dict[str, float]:
    figures = {"output_tokens_per_s": num_output_tokens / duration_s}
    for name, values in (("ttft", ttfts_s), ("tpot", tpots_s)):
        for percent in (50, 99):
            if len(values):  # an answer of one token has no time per token after the first
                figures[f"{name}_p{percent}_s"] = float(np.percentile(values, percent))
    return figures | {"duration_s": duration_s}


def _served(trace: StepTrace) -> tuple[list[_Served], float]:
    """All requests in order of arrival with what became of them, and the end of the last step."""
    served: dict[str, _Served] = {}
    together: list[_Served] = []
    last: TraceStep | None = None
    for event in trace.events():
        if isinstance(event, TraceArrival):
            if event.num_sequences != 1 or event.output_token_ids:
                raise SimulationError(
                    f"{trace.path}: request {event.id!r} has {event.num_sequences} sequences and "
                    f"{len(event.output_token_ids)} tokens from before; validate a trace of "
                    "single, fresh requests"
                )
            served[event.id] = _Served(event, event.at_s)
            together.append(served[event.id])
        elif isinstance(event, TraceStep):
            _spread(together, last)
            together = []
            for request_id, num, context in zip(
                event.sequences, event.nums, event.context, strict=True
            ):
                one = served.get(request_id)  # else a probe of the engine's own
                if one is None or event.was_discarded:
                    continue
                one.num_computed = context + num
                one.last_token_s = event.start_s + event.duration_s
                if one.first_token_s is None and context + num >= one.arrived.num_prompt_tokens:
                    one.first_token_s = event.start_s + event.duration_s
            last = event
    return list(served.values()), last.start_s + last.duration_s if last else 0.0


def _spread(together: list[_Served], last: TraceStep | None) -> None:
    """A trace has the time at which the engine took a request from its inbox, between two steps.
    Requests that were taken together arrived evenly over the step before, on both sides alike."""
    if last is None or not together:
        return
    if together[0].arrived.at_s > last.start_s + last.duration_s + _AT_ONCE_S:
        return
    for place, one in enumerate(together, start=1):
        one.arrival_s = last.start_s + last.duration_s * place / (len(together) + 1)
