"""How well a simulation foretells a recorded run: its own arrivals, served by its own settings,
with step times fitted on it or on another run; throughput and time to first token of both.

A record has the time at which the engine took a request from its inbox, between two steps. While a
step ran, requests came at some moment in it: those taken together are spread evenly over it, for
both sides alike. Answers are as long as they were.
"""

import dataclasses
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from engine_core.trace.reader import TraceArrival, TraceStep
from scripts.simulator.engine import SimulatedEngine
from scripts.simulator.errors import SimulationError
from scripts.simulator.fitted import FittedModel
from scripts.simulator.fleet import Fleet
from scripts.simulator.records import RunRecord
from scripts.simulator.request_metrics import RequestMetrics, ServiceTargets
from scripts.simulator.routing import RoundRobin
from scripts.simulator.trace import TraceRequest

_AT_ONCE_S = 0.005
"""Taken no later than this after a step's end: it came while the step ran."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedRequest(TraceRequest):
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


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedTrace:
    name: str
    requests: tuple[RecordedRequest, ...]
    num_skipped: int

    def __iter__(self) -> Iterator[TraceRequest]:
        yield from self.requests


def validate(record: RunRecord, model: FittedModel) -> dict[str, Any]:
    """The document.

    Raises:
        SimulationError: a record without a finished request, or with parallel samples.
    """
    served = _served(record)
    done = [one for one in served if one.first_token_s is not None]
    if not done:
        raise SimulationError(f"{record.path} holds no request that got a token; record more")
    first_s = min(one.arrival_s for one in done)
    last_s = max(
        step.start_s + step.duration_s for step in record.events() if isinstance(step, TraceStep)
    )
    trace = _trace(record, done, first_s, len(served) - len(done))
    metrics = RequestMetrics()
    engine = SimulatedEngine(record.scheduler_config(), record.cache(), model, metrics)
    fleet = Fleet([engine], RoundRobin())
    fleet.run(trace)
    num_output = sum(request.num_output_tokens for request in trace.requests)
    real = _figures(
        np.array([one.first_token_s - one.arrival_s for one in done if one.first_token_s]),
        num_output,
        last_s - first_s,
    )
    simulated = _figures(
        metrics.latencies("ttft"),
        metrics.summary(1.0, ServiceTargets())["num_output_tokens"],
        fleet.finished_s,
    )
    return {
        "record": str(record.path),
        "num_requests": len(done),
        "num_left_out": len(served) - len(done),
        "step_model": model.describe(),
        "recorded": real,
        "simulated": simulated,
        "simulated_to_recorded": {name: simulated[name] / real[name] for name in real},
    }


def as_table(document: dict[str, Any]) -> str:
    recorded, simulated = document["recorded"], document["simulated"]
    lines = [
        f"{document['num_requests']} requests of {document['record']}",
        f"{'':<28}{'recorded':>12}{'simulated':>12}{'ratio':>8}",
    ]
    lines += [
        f"{name:<28}{recorded[name]:>12.3f}{simulated[name]:>12.3f}{ratio:>8.3f}"
        for name, ratio in document["simulated_to_recorded"].items()
    ]
    return "\n".join(lines)


def _figures(
    ttfts_s: npt.NDArray[np.float64], num_output_tokens: int, seconds: float
) -> dict[str, float]:
    p50, p99 = np.percentile(ttfts_s, [50, 99])
    return {
        "output_tokens_per_s": num_output_tokens / seconds,
        "ttft_p50_s": float(p50),
        "ttft_p99_s": float(p99),
        "duration_s": seconds,
    }


def _served(record: RunRecord) -> list[_Served]:
    """All requests of the record in order of arrival, and what became of them."""
    served: dict[str, _Served] = {}
    done: list[_Served] = []
    together: list[_Served] = []
    last: TraceStep | None = None
    for event in record.events():
        if isinstance(event, TraceArrival):
            if event.num_sequences != 1 or event.output_token_ids:
                raise SimulationError(
                    f"{record.path}: request {event.id!r} has {event.num_sequences} sequences and "
                    f"{len(event.output_token_ids)} tokens from before; validate a record of "
                    "single, fresh requests"
                )
            one = _Served(event, event.at_s)
            served[event.id] = one
            done.append(one)
            together.append(one)
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
    return done


def _spread(together: list[_Served], last: TraceStep | None) -> None:
    """Requests that came while a step ran, evenly over it."""
    if last is None or not together:
        return
    end_s = last.start_s + last.duration_s
    if together[0].arrived.at_s > end_s + _AT_ONCE_S:
        return
    for place, one in enumerate(together, start=1):
        one.arrival_s = last.start_s + last.duration_s * place / (len(together) + 1)


def _trace(
    record: RunRecord, done: list[_Served], first_s: float, num_left_out: int
) -> RecordedTrace:
    requests = [
        RecordedRequest(
            index=index,
            arrival_s=one.arrival_s - first_s,
            num_text_tokens=one.arrived.num_prompt_tokens,
            # the last token is sampled and never computed
            num_output_tokens=one.num_computed - one.arrived.num_prompt_tokens + 1,
            tenant=one.arrived.tenant,
            priority=one.arrived.priority,
            token_ids=tuple(one.arrived.prompt),
        )
        for index, one in enumerate(done)
    ]
    return RecordedTrace(record.path.name, tuple(requests), num_left_out)
