"""Small simulations, made by hand: fixed requests, engines whose steps take round numbers."""

import dataclasses
from collections.abc import Iterator

from engine_core.scheduler import SchedulerConfig
from scripts.simulator.engine import CacheSize, SimulatedEngine
from scripts.simulator.fleet import Fleet
from scripts.simulator.request_metrics import RequestMetrics
from scripts.simulator.routing import RoundRobin, Router
from scripts.simulator.step_work import LinearStepModel, StepModel
from scripts.simulator.trace import TraceRequest


@dataclasses.dataclass(frozen=True)
class ListedTrace:
    requests: tuple[TraceRequest, ...]
    name: str = "listed"
    num_skipped: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        yield from self.requests


@dataclasses.dataclass(frozen=True)
class Run:
    fleet: Fleet
    engines: list[SimulatedEngine]
    metrics: RequestMetrics


def request(index: int, arrival_s: float, num_prompt: int, num_output: int, **more) -> TraceRequest:
    return TraceRequest(
        index=index,
        arrival_s=arrival_s,
        num_text_tokens=num_prompt,
        num_output_tokens=num_output,
        **more,
    )


def serve(
    *requests: TraceRequest,
    num_engines: int = 1,
    router: Router | None = None,
    model: StepModel | None = None,
    num_blocks: int = 1000,
    max_num_batched_tokens: int = 100,
    max_num_seqs: int = 8,
    max_model_len: int = 1000,
    **config,
) -> Run:
    """A step takes 1 s and 0.01 s a token, unless another model is given."""
    metrics = RequestMetrics()
    engines = [
        SimulatedEngine(
            SchedulerConfig(
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                **config,
            ),
            CacheSize(num_blocks=num_blocks, block_size=16).make(),
            model or LinearStepModel(1.0, 0.01),
            metrics,
        )
        for _ in range(num_engines)
    ]
    fleet = Fleet(engines, router or RoundRobin())
    fleet.run(ListedTrace(requests))
    return Run(fleet, engines, metrics)
