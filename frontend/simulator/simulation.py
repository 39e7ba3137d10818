"""One simulation: its options in, a document of plain values out; and the planner, which looks for
the smallest fleet. The same options give the same document, on any machine."""

import dataclasses
import functools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from frontend.fleet.router import ROUTING_POLICIES
from frontend.simulator import SimulationError
from frontend.simulator.engine import SimulatedEngine
from frontend.simulator.fleet import Fleet, make_router
from frontend.simulator.metrics import RequestMetrics
from frontend.simulator.options import (
    NUM_SYNTHETIC,
    EngineOptions,
    FleetOptions,
    StepTimeOptions,
    TraceOptions,
)


@Parameter(name="*")
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

    def in_words(self) -> str:
        """Model, hardware and load, given or not, and every other option that is no default."""
        trace, times = self.trace, self.step_times
        said = {"hardware", "model", "fitted", "trace", "trace_format"}
        roofline = f"{times.model} on {times.hardware} (a roofline)"
        parts = [roofline if times.fitted is None else f"step times of {times.fitted}"]
        if trace.trace is not None:
            parts.append(f"requests of {trace.trace} ({trace.trace_format})")
        else:
            said |= {"num_requests", "arrivals", "rate", "prompt_len", "output_len", "length_pairs"}
            lengths = f"prompts of {trace.prompt_len} tokens, answers of {trace.output_len}"
            parts += [
                f"{trace.num_requests or NUM_SYNTHETIC} requests, {trace.rate:g} a second, "
                f"{trace.arrivals} arrivals",
                f"lengths of {trace.length_pairs}" if trace.length_pairs else lengths,
            ]
        defaults = Scenario().describe()
        for group, options in self.describe().items():
            for name, value in options.items():
                if name not in said and value != defaults[group][name]:
                    option = name.replace("_", "-")
                    parts.append(f"--no-{option}" if value is False else f"--{option} {value}")
        return "; ".join(parts)


def simulate(scenario: Scenario) -> dict[str, Any]:
    """The document."""
    options = scenario.fleet
    slo = options.slo()
    config = scenario.engine.scheduler_config(options)
    block_size, num_blocks = scenario.engine.block_size, scenario.engine.num_blocks
    num_stages = config.pipeline_parallel_size
    if num_blocks is None:
        num_blocks = scenario.step_times.roofline(block_size, num_stages).num_blocks()
    trace = scenario.trace.make(config.max_model_len)
    model = scenario.step_times.make(block_size, scenario.trace.seed, num_stages)
    router = make_router(options.router, scenario.trace.seed, block_size)
    metrics = RequestMetrics()
    engines = [
        SimulatedEngine(config, scenario.engine.make_cache(num_blocks), model, metrics)
        for _ in range(options.engines)
    ]
    fleet = Fleet(engines, router, options.max_duration, view_s=options.view_s())
    fleet.run(scenario.trace.requests(trace))
    return {
        "scenario": scenario.describe(),
        "step_model": model.describe(),
        "trace": {
            "name": trace.name,
            "num_requests": fleet.num_requests,
            "num_rows_skipped": trace.num_skipped,
            "num_turns_dropped": fleet.num_turns_dropped,
        },
        "requests": metrics.summary(fleet.finished_s, slo),
        "engines": engine_summary(engines, num_blocks, fleet.finished_s),
        "router": {
            "name": options.router,
            "expected_hit_rate": fleet.expected_hit_rate
            if options.router in ROUTING_POLICIES
            else None,
        },
    }


def engine_summary(
    engines: list[SimulatedEngine], num_blocks: int, duration_s: float
) -> dict[str, Any]:
    counters = [engine.counters for engine in engines]
    statistics = [engine.statistics() for engine in engines]

    def total(counted: Sequence[object], name: str) -> float:
        found: float = sum(getattr(one, name) for one in counted)
        return found

    num_steps = int(total(counters, "num_steps"))
    engine_seconds = duration_s * len(engines)
    received = [one.num_received for one in counters]
    prompt = total(statistics, "num_prompt_tokens")
    cached = total(statistics, "num_cached_prompt_tokens")
    in_host = total(statistics, "num_host_cached_prompt_tokens")
    swapped = total(statistics, "num_preemptions_by_swap")
    return {
        "num_engines": len(engines),
        "num_steps": num_steps,
        "mean_tokens_a_step": _ratio(total(counters, "num_step_tokens"), num_steps),
        "mean_batch": _ratio(total(counters, "num_step_sequences"), num_steps),
        "utilisation": _ratio(total(counters, "busy_s"), engine_seconds),
        "cache_hit_rate": {
            "all": _ratio(cached, prompt),
            "device": _ratio(cached - in_host, prompt),
            "host": _ratio(in_host, prompt),
        },
        "preemptions": {
            "recompute": total(statistics, "num_preemptions") - swapped,
            "swap": swapped,
            "forced": total(statistics, "num_preemptions_forced"),
        },
        "blocks": {
            "total_an_engine": num_blocks,
            "mean_share_used": _ratio(
                total(counters, "block_seconds"), engine_seconds * num_blocks
            ),
            "peak_share_used": max(one.peak_blocks for one in counters) / num_blocks,
        },
        "requests_an_engine": {
            "least": min(received),
            "mean": sum(received) / len(received),
            "most": max(received),
        },
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# ---------------------------------------------------------------------- planner


def plan(
    scenario: Scenario, budgets: tuple[int, ...], max_replicas: int, num_processes: int | None
) -> dict[str, Any]:
    """The document: every trial in order, and the best: the fewest replicas whose p99 latencies are
    within the SLO, then the least p99 TTFT. A process for each budget."""
    slo = scenario.fleet.slo()
    if slo.ttft_s is None and slo.tpot_s is None:
        raise SimulationError("there is no SLO; give --slo-ttft-ms or --slo-tpot-ms, or both")
    budgets = tuple(sorted(set(budgets)))
    search = functools.partial(fewest_replicas, scenario, max_replicas=max_replicas)
    num_processes = min(num_processes or os.cpu_count() or 1, len(budgets))
    if num_processes == 1:
        searched = [search(budget) for budget in budgets]
    else:
        # spawn: a fork would copy the parent's threads
        # Ctrl-C reaches this process, which ends them
        ignored = signal.signal, (signal.SIGINT, signal.SIG_IGN)
        with multiprocessing.get_context("spawn").Pool(num_processes, *ignored) as pool:
            searched = pool.map(search, budgets, chunksize=1)
    trials = [trial for of_budget in searched for trial in of_budget]
    return {
        "scenario": scenario.describe(),
        "slo": dataclasses.asdict(slo),
        "max_replicas": max_replicas,
        "tried": trials,
        "best": min(
            (trial for trial in trials if trial["why_not"] is None),
            key=lambda trial: (trial["replicas"], trial["ttft_p99_s"] or 0.0),
            default=None,
        ),
    }


def fewest_replicas(scenario: Scenario, budget: int, *, max_replicas: int) -> list[dict[str, Any]]:
    """All trials of one budget, by replicas; the first within the SLO is the answer, if one is.
    Found by doubling and halving: more replicas are taken never to serve worse."""
    trials: dict[int, dict[str, Any]] = {}

    def is_enough(replicas: int) -> bool:
        trials[replicas] = _try(scenario, budget, replicas)
        return trials[replicas]["why_not"] is None

    too_few, enough = 0, 1
    while not is_enough(enough):
        too_few = enough
        if enough == max_replicas:
            break
        enough = min(2 * enough, max_replicas)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return [trials[replicas] for replicas in sorted(trials)]


def _try(scenario: Scenario, budget: int, replicas: int) -> dict[str, Any]:
    scenario = dataclasses.replace(
        scenario,
        engine=dataclasses.replace(scenario.engine, max_num_batched_tokens=budget),
        fleet=dataclasses.replace(scenario.fleet, engines=replicas),
    )
    document = simulate(scenario)
    requests = document["requests"]
    ttft, tpot = (
        None if requests[name] is None else requests[name]["p99"] for name in ("ttft_s", "tpot_s")
    )
    slo = scenario.fleet.slo()
    why_not = None
    if requests["num_refused"]:
        why_not = f"{requests['num_refused']} requests refused"
    elif slo.ttft_s is not None and ttft is not None and ttft > slo.ttft_s:
        why_not = "p99 TTFT above the SLO"
    elif slo.tpot_s is not None and tpot is not None and tpot > slo.tpot_s:
        why_not = "p99 TPOT above the SLO"
    return {
        "max_num_batched_tokens": budget,
        "replicas": replicas,
        "ttft_p99_s": ttft,
        "tpot_p99_s": tpot,
        "utilisation": document["engines"]["utilisation"],
        "mean_tokens_a_step": document["engines"]["mean_tokens_a_step"],
        "output_tokens_per_s": requests["throughput"]["output_tokens_per_s"],
        "num_refused": requests["num_refused"],
        "why_not": why_not,
    }
