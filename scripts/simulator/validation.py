"""How well a simulation predicts a traced run: the same arrivals and settings, with step times
fitted on it or on another run; throughput and TTFT of both.
"""

import dataclasses
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.trace import TraceArrival, TraceStep
from scripts.simulator import SimulationError
from scripts.simulator.engine import SimulatedEngine
from scripts.simulator.fleet import Fleet, RoundRobin
from scripts.simulator.metrics import RequestMetrics
from scripts.simulator.step_times import FittedModel
from scripts.simulator.step_trace import StepTrace
from scripts.simulator.trace import TraceRequest

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
    num_computed: int = 0


def validate(trace: StepTrace, model: FittedModel) -> dict[str, Any]:
    """The document."""
    served, end_s = _served(trace)
    done = [one for one in served if one.first_token_s is not None]
    if not done:
        raise SimulationError(f"{trace.path} holds no request that got a token; trace more")
    start_s = min(one.arrival_s for one in done)
    requests = _requests(trace, done, start_s)
    metrics = RequestMetrics()
    engine = SimulatedEngine(trace.scheduler_config(), trace.make_cache(), model, metrics)
    fleet = Fleet([engine], RoundRobin())
    fleet.run(requests)
    ttfts_s = [one.first_token_s - one.arrival_s for one in done if one.first_token_s is not None]
    num_output = sum(request.num_output_tokens for request in requests)
    recorded = _figures(np.array(ttfts_s), num_output, end_s - start_s)
    simulated = _figures(metrics.latencies("ttft"), metrics.num_output_tokens, fleet.finished_s)
    return {
        "step_trace": str(trace.path),
        "num_requests": len(done),
        "num_left_out": len(served) - len(done),
        "step_model": model.describe(),
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
    ttfts_s: npt.NDArray[np.float64], num_output_tokens: int, duration_s: float
) -> dict[str, float]:
    p50, p99 = np.percentile(ttfts_s, [50, 99])
    return {
        "output_tokens_per_s": num_output_tokens / duration_s,
        "ttft_p50_s": float(p50),
        "ttft_p99_s": float(p99),
        "duration_s": duration_s,
    }


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
                one = served[request_id]
                one.num_computed = context + num
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


def _requests(trace: StepTrace, done: list[_Served], start_s: float) -> list[TracedRequest]:
    return [
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
