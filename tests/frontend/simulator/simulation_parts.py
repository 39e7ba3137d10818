"""Small simulations, made by hand: fixed requests, engines whose steps take round numbers."""

import dataclasses

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import SchedulerConfig
from frontend.load.traces.trace import TraceRequest
from frontend.simulator.engine import SimulatedEngine
from frontend.simulator.fleet import Fleet, Router, round_robin
from frontend.simulator.metrics import RequestMetrics
from frontend.simulator.step_times import StepTimeModel, StepWork


@dataclasses.dataclass(frozen=True)
class Run:
    fleet: Fleet
    engines: list[SimulatedEngine]
    metrics: RequestMetrics


class LinearStepModel:
    """Seconds = the sum of features times coefficients, in the order of FEATURES."""

    def __init__(self, *coefficients: float) -> None:
        self._coefficients = coefficients

    def duration_s(self, work: StepWork) -> float:
        return sum(a * b for a, b in zip(self._coefficients, work.features, strict=False))

    def describe(self) -> dict[str, object]:
        return {"model": "linear", "coefficients": list(self._coefficients)}


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
    model: StepTimeModel | None = None,
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
            KVCacheManager(num_blocks=num_blocks, block_size=16),
            model or LinearStepModel(1.0, 0.01),
            metrics,
        )
        for _ in range(num_engines)
    ]
    fleet = Fleet(engines, router or round_robin())
    fleet.run(requests)
    return Run(fleet, engines, metrics)
