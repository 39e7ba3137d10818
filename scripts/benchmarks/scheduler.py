"""Microseconds that the scheduler takes: a step, an arrival, a client that watches."""

import gc
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
from cyclopts import Parameter

from engine_core.errors import RequestRefused
from engine_core.kv_cache import KVCacheManager
from engine_core.observers.base import FinishedStep, Loop
from engine_core.observers.live_view import LiveView
from engine_core.observers.scheduler_view import scheduler_view
from engine_core.scheduler import (
    ModelRunnerOutput,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from engine_core.scheduler.config import PolicyName
from engine_core.server.clients import Client
from engine_core.startup.scheduler import build_scheduler
from protocol.calls import AnyResult, WatchScheduler
from protocol.codec import encode
from protocol.outputs import CallResult
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from scripts.benchmarks import Json, report

BLOCK_SIZE = 16
PROMPT_LEN = 512
MAX_MODEL_LEN = 4096
ADMISSION_BUDGET = 8192
PARAMS = SamplingParams(max_tokens=MAX_MODEL_LEN - PROMPT_LEN - 2 * BLOCK_SIZE, ignore_eos=True)


def clock_us() -> float:
    return time.perf_counter_ns() / 1e3


def make_requests(count: int, *, spread: bool = True) -> list[Request]:
    """Their prompts have no block in common. `spread`: in each step one in 16 opens a block;
    otherwise all prompts have PROMPT_LEN tokens."""
    tokens = np.random.default_rng(0).integers(0, 32_000, size=PROMPT_LEN + BLOCK_SIZE).tolist()
    requests = []
    for index in range(count):
        num_tokens = PROMPT_LEN + (index % BLOCK_SIZE if spread else 0)
        prompt = [index, *tokens[1:num_tokens]]
        message = EngineRequest(
            request_id=f"request-{index}", prompt_token_ids=prompt, sampling_params=PARAMS
        )
        requests.append(Request(message))
    return requests


def make_scheduler(num_running: int, budget: int, policy: PolicyName) -> Scheduler:
    """With room for that many prompts and 1,280 tokens behind each."""
    num_blocks = num_running * (-(-(PROMPT_LEN + BLOCK_SIZE + 1280) // BLOCK_SIZE)) + 1
    config = SchedulerConfig(
        max_num_batched_tokens=budget,
        max_num_seqs=num_running,
        max_model_len=MAX_MODEL_LEN,
        scheduling_policy=policy,
    )
    return build_scheduler(config, KVCacheManager(num_blocks=num_blocks, block_size=BLOCK_SIZE))


def sampled(plan: SchedulerOutput) -> ModelRunnerOutput:
    """One token for each sequence of the step."""
    req_ids = plan.batch.req_ids
    return ModelRunnerOutput(
        req_ids=req_ids, sampled_token_ids=np.full(len(req_ids), 7, dtype=np.int32)
    )


def admit_all(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """Go on until every prompt is computed and its first token is there."""
    for request in requests:
        scheduler.add_request(request)
    while any(request.num_output_tokens == 0 for request in requests):
        plan = scheduler.schedule(now=0.0)
        scheduler.update_from_output(plan, sampled(plan), now=0.0)


def run_steps(scheduler: Scheduler, num_steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"schedule": [], "update": [], "step": []}
    for _ in range(num_steps):
        start = clock_us()
        plan = scheduler.schedule(now=0.0)
        planned = clock_us()
        output = sampled(plan)  # the runner's work, not the scheduler's
        ready = clock_us()
        scheduler.update_from_output(plan, output, now=0.0)
        done = clock_us()
        times["schedule"].append(planned - start)
        times["update"].append(done - ready)
        times["step"].append(planned - start + done - ready)
    return times


def summary(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "median": round(statistics.median(values), 1),
            "mean": round(statistics.fmean(values), 1),
            "p99": round(sorted(values)[int(0.99 * (len(values) - 1))], 1),
        }
        for name, values in times.items()
    }


def measure_decode(num_running: int, num_steps: int, policy: PolicyName) -> dict[str, Any]:
    """Steps in which every running request decodes one token."""
    scheduler = make_scheduler(num_running, num_running * (PROMPT_LEN + BLOCK_SIZE), policy)
    admit_all(scheduler, make_requests(num_running))
    run_steps(scheduler, BLOCK_SIZE)
    gc.collect()
    times = run_steps(scheduler, num_steps)
    assert scheduler.get_request_counts() == (num_running, 0)
    assert scheduler.statistics().num_preemptions == 0
    return {"num_running": num_running} | summary(times)


def measure_arrival(num_requests: int, policy: PolicyName) -> dict[str, float]:
    """Microseconds a request of 512 tokens, part by part, in the order in which they happen."""
    scheduler = make_scheduler(num_requests, ADMISSION_BUDGET, policy)
    gc.collect()
    start = clock_us()
    requests = make_requests(num_requests, spread=False)
    made = clock_us()
    # in a cache of its own, in which nothing is found; the request keeps the hashes
    cache = KVCacheManager(num_blocks=PROMPT_LEN, block_size=BLOCK_SIZE)
    for request in requests:
        cache.find_cached_prefix(request.sequences[0])
    hashed = clock_us()
    for request in requests:
        scheduler.add_request(request)
    spent_us = {
        "request_object": made - start,
        "block_hashes": hashed - made,
        "add_request": clock_us() - hashed,
        "schedule_until_all_are_admitted": 0.0,
        "update_until_all_are_admitted": 0.0,
    }
    while scheduler.get_request_counts()[1]:
        times = run_steps(scheduler, 1)
        spent_us["schedule_until_all_are_admitted"] += times["schedule"][0]
        spent_us["update_until_all_are_admitted"] += times["update"][0]
    parts = {name: round(us / num_requests, 2) for name, us in spent_us.items()}
    return parts | {"all": round(sum(parts.values()), 2)}


def measure_watching(num_running: int, num_steps: int, policy: PolicyName) -> dict[str, Any]:
    """What a client that watches costs: a step noted, and a snapshot of that many, encoded."""
    scheduler = make_scheduler(num_running, ADMISSION_BUDGET, policy)
    admit_all(scheduler, make_requests(num_running))
    num_bytes, times = [0], dict[str, list[float]](noted=[], snapshot=[])
    view, client = LiveView(partial(scheduler_view, scheduler)), Client(0, b"", "")
    loop = SimpleNamespace(statistics=scheduler.statistics, clock=lambda: 0.0)
    view.join(cast(Loop, loop))
    watch = view.handlers()[WatchScheduler]

    def reply(result: AnyResult | RequestRefused) -> None:
        assert not isinstance(result, RequestRefused)
        num_bytes.append(len(encode(CallResult(call_id=1, result=result))))

    for step in range(num_steps):
        plan = scheduler.schedule(now=0.0)
        output = sampled(plan)
        scheduler.update_from_output(plan, output, now=0.0)
        is_due = step % 10 == 0
        if is_due:
            watch(client, WatchScheduler(step - 10), reply)
        start = clock_us()
        view.on_step(FinishedStep(plan, output, 0.0, 0.0, is_due * 1e9, True))
        times["snapshot" if is_due else "noted"].append(clock_us() - start)
    return {"num_running": num_running, "num_bytes": num_bytes[-1]} | summary(times)


def scheduler(
    *,
    quick: Annotated[bool, Parameter(help="Tiny sizes: does it run at all?")] = False,
    scheduling_policy: PolicyName = "fair",
    json: Json = None,
) -> None:
    """No model and no torch: the sampled tokens are made up. One thread; the garbage collector runs
    as it does in the engine."""
    sizes = (4, 16) if quick else (64, 256, 1024, 4096)
    num_steps = 16 if quick else 256
    many = 16 if quick else 1024
    figures = {
        "decode": [measure_decode(size, num_steps, scheduling_policy) for size in sizes],
        "arrival": {"num_requests": many, "num_tokens": PROMPT_LEN}
        | measure_arrival(many, scheduling_policy),
        "watching": [measure_watching(size, num_steps, scheduling_policy) for size in sizes],
    }
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported: the scheduler must not need it")
    report(figures, json, as_table(figures))


def as_table(result: dict[str, Any]) -> str:
    """Medians, microseconds."""
    parts = ("schedule", "update", "step")
    lines = [f"{'a step: running decodes':34}" + "".join(f"{part:>10}" for part in parts)]
    for row in result["decode"]:
        numbers = "".join(f"{row[part]['median']:>10,.0f}" for part in parts)
        lines.append(f"{row['num_running']:<34,}{numbers}")
    lines += ["", f"an arrival of {result['arrival']['num_tokens']} tokens"]
    lines += [f"{name:34}{value:>10,.1f}" for name, value in list(result["arrival"].items())[2:]]
    lines += ["", f"{'watched: running decodes':34}" + f"{'a step':>10}{'a snapshot':>12}"]
    for row in result["watching"]:
        noted, taken = row["noted"]["median"], row["snapshot"]["median"]
        lines += [
            f"{row['num_running']:<34,}{noted:>10,.1f}{taken:>12,.0f}, {row['num_bytes']:,} bytes"
        ]
    return "\n".join(lines)
