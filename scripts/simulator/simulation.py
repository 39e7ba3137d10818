"""One simulation: its options in, a document of plain values out. The same options, the same
document: nothing in it depends on a clock, a process or a machine.
"""

import dataclasses
from pathlib import Path
from typing import Any

from scripts.simulator.engine import CacheSize, SimulatedEngine
from scripts.simulator.errors import SimulationError
from scripts.simulator.fleet import Fleet
from scripts.simulator.options import EngineOptions, FleetOptions, StepTimeOptions, TraceOptions
from scripts.simulator.request_metrics import RequestMetrics
from scripts.simulator.routing import CacheAware, make_router
from scripts.simulator.sliced_fleet import SlicedFleet
from scripts.simulator.timeline import Timeline

MAX_ENGINES = 100_000
_COUNTERS = (
    "num_prompt_tokens",
    "num_cached_prompt_tokens",
    "num_host_cached_prompt_tokens",
    "num_preemptions",
    "num_preemptions_by_swap",
    "num_preemptions_forced",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    trace: TraceOptions = dataclasses.field(default_factory=TraceOptions)
    engine: EngineOptions = dataclasses.field(default_factory=EngineOptions)
    step_times: StepTimeOptions = dataclasses.field(default_factory=StepTimeOptions)
    fleet: FleetOptions = dataclasses.field(default_factory=FleetOptions)

    def describe(self) -> dict[str, Any]:
        return {
            field.name: {
                name: str(value) if isinstance(value, Path) else value
                for name, value in dataclasses.asdict(getattr(self, field.name)).items()
            }
            for field in dataclasses.fields(self)
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    document: dict[str, Any]
    metrics: RequestMetrics
    timeline: Timeline | None


def simulate(scenario: Scenario, *, with_timeline: bool = False) -> Outcome:
    """
    Raises:
        SimulationError, ValueError: an option outside its limits, a bad row in the trace, or a run
            that does not end.
    """
    fleet_options = scenario.fleet
    if not 1 <= fleet_options.engines <= MAX_ENGINES:
        raise SimulationError(
            f"--engines is {fleet_options.engines}, it must be from 1 to {MAX_ENGINES}"
        )
    targets = fleet_options.targets()
    config = scenario.engine.scheduler()
    cache = scenario.engine.cache(scenario.step_times)
    trace = scenario.trace.make(config.max_model_len)
    model = scenario.step_times.make(cache.block_size, scenario.trace.seed)
    metrics = RequestMetrics()
    timeline = Timeline() if with_timeline else None
    engines = [
        SimulatedEngine(config, cache.make(), model, metrics, timeline)
        for _ in range(fleet_options.engines)
    ]
    router = make_router(fleet_options.router, scenario.trace.seed)
    view_s = fleet_options.view_s(router)
    fleet: Fleet | SlicedFleet
    # pictures and noise add up, and draw, in the order of all engines' steps
    if (
        (view_s or not router.reads_loads)
        and timeline is None
        and not scenario.trace.has_chats
        and not scenario.step_times.noise
    ):
        fleet = SlicedFleet(
            engines, router, metrics, view_s=view_s, max_duration_s=fleet_options.max_duration
        )
    else:
        fleet = Fleet(engines, router, fleet_options.max_duration, view_s=view_s)
    fleet.run(trace)
    duration_s = fleet.finished_s
    document = {
        "scenario": scenario.describe(),
        "step_model": model.describe(),
        "trace": {
            "name": trace.name,
            "num_requests": fleet.num_requests,
            "num_rows_skipped": trace.num_skipped,
            "num_turns_dropped": fleet.num_turns_dropped,
        },
        "requests": metrics.summary(duration_s, targets),
        "engines": engine_summary(engines, cache, duration_s),
        "router": {
            "name": fleet_options.router,
            "expected_hit_rate": router.expected_hit_rate
            if isinstance(router, CacheAware)
            else None,
        },
    }
    return Outcome(document, metrics, timeline)


def engine_summary(
    engines: list[SimulatedEngine], cache: CacheSize, duration_s: float
) -> dict[str, Any]:
    """Over all engines."""
    totals = dict.fromkeys(_COUNTERS, 0)
    for engine in engines:
        statistics = engine.statistics()
        for name in _COUNTERS:
            totals[name] += getattr(statistics, name)
    counters = [engine.counters for engine in engines]
    num_steps = sum(one.num_steps for one in counters)
    engine_seconds = duration_s * len(engines)
    received = [one.num_received for one in counters]
    cached, in_host = totals["num_cached_prompt_tokens"], totals["num_host_cached_prompt_tokens"]
    return {
        "num_engines": len(engines),
        "num_steps": num_steps,
        "mean_tokens_a_step": _ratio(sum(one.num_step_tokens for one in counters), num_steps),
        "mean_batch": _ratio(sum(one.num_step_sequences for one in counters), num_steps),
        "utilisation": _ratio(sum(one.busy_s for one in counters), engine_seconds),
        "cache_hit_rate": {
            "all": _ratio(cached, totals["num_prompt_tokens"]),
            "device": _ratio(cached - in_host, totals["num_prompt_tokens"]),
            "host": _ratio(in_host, totals["num_prompt_tokens"]),
        },
        "preemptions": {
            "recompute": totals["num_preemptions"] - totals["num_preemptions_by_swap"],
            "swap": totals["num_preemptions_by_swap"],
            "forced": totals["num_preemptions_forced"],
        },
        "blocks": {
            "total_an_engine": cache.num_blocks,
            "mean_share_used": _ratio(
                sum(one.block_seconds for one in counters), engine_seconds * cache.num_blocks
            ),
            "peak_share_used": max(one.peak_blocks for one in counters) / cache.num_blocks,
        },
        "requests_an_engine": {
            "least": min(received),
            "mean": sum(received) / len(received),
            "most": max(received),
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
