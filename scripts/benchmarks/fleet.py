"""Engines behind the HTTP server, and what the simulator foretells of them: it has step times that
were fitted to one engine at one load, and gets the same requests."""

import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter

from frontend import AsyncLLM, run
from frontend.cli.options import option
from frontend.load.clients import OpenLoop, run_clients
from frontend.load.http_streams import Server
from frontend.load.records import span_s
from frontend.load.workload import Arrivals, DatasetOptions, Workload
from frontend.simulator.engine import SimulatedEngine
from frontend.simulator.fleet import Fleet, make_router
from frontend.simulator.metrics import RequestMetrics
from frontend.simulator.replay import TracedRequest
from frontend.simulator.step_times import NoisyModel
from frontend.simulator.step_trace import StepTrace, fit_step_trace
from scripts.benchmarks import (
    DEFAULT_MODEL,
    START_TIMEOUT_S,
    Json,
    Model,
    plain_environment,
    report,
)
from scripts.comparison.processes import EngineProcess

_UNITS = range(1000, 40_000)
"""Token ids of prompts."""
_PERCENT = (50, 99)
_STEP_S = (0.045, 200e-6, 300e-6, 0.4e-6)
"""Of each step, token, sequence, and token of context: about a model of 7 billion weights on a GPU
that reads 300 GB/s."""
_SLEEPING = Path(__file__).with_name("sleeping_engine.py")


def fleet(
    *,
    model: Model = DEFAULT_MODEL,
    engines: Annotated[int, option("Behind the server.", gte=1)] = 4,
    real: Annotated[
        bool, Parameter(help="Run the model; default: steps sleep as long as a cost model says.")
    ] = False,
    options: Annotated[
        str, Parameter(help="Of the daemons.", allow_leading_hyphen=True)
    ] = "--num-blocks 800 --max-num-seqs 16 --max-num-batched-tokens 512 --max-model-len 1024",
    rate: Annotated[
        tuple[float, ...], Parameter(help="Requests a second.", consume_multiple=True)
    ] = (8.0, 12.0, 16.0),
    fit_rate: Annotated[float, option("Of the one engine that is fitted to.", gt=0)] = 2.5,
    policy: Annotated[str, Parameter(help="As --routing-policy.")] = "cache-aware",
    duration: Annotated[float, option("Seconds of each load.", gt=0)] = 40.0,
    prefixes: Annotated[int, option("Shared prefixes.", gte=0)] = 24,
    prefix_len: Annotated[int, option("Tokens of each.", gte=1)] = 512,
    input_len: Annotated[str, Parameter(help="A prompt's own tokens.")] = "log-uniform:32:256",
    output_len: Annotated[str, Parameter(help="Tokens.")] = "log-uniform:16:64",
    step_trace: Annotated[
        Path | None, Parameter(help="Kept here; if it is there already, it is what is fitted to.")
    ] = None,
    delivery_ms: Annotated[
        float, option("Of a trace that is there: from the engine's first token to ours.", gte=0)
    ] = 0.0,
    json: Json = None,
) -> int:
    """Hit rate, throughput and time to first token, measured and foretold."""
    load = DatasetOptions(
        prefixes=prefixes, prefix_len=prefix_len, input_len=input_len, output_len=output_len
    )
    program = [str(_SLEEPING)] if not real else ["-m", "engine_core.cli"]
    command = [sys.executable, *program, "--model", model, *options.split()]
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        folder, trace = Path(name), step_trace or Path(name) / "steps.trace"
        if not trace.exists():
            workload = _workload(load, 0, fit_rate, duration)
            with _serving([[*command, "--trace", str(trace)]], policy, folder) as (server, _):
                measured, _ = _measure(server, workload)
            foretold = foretold_run(trace, workload, 1, policy)
            delivery_ms = 1000 * (measured["ttft_p50_s"] - foretold["ttft_p50_s"])
        rows = []
        with _serving([command] * engines, policy, folder) as (server, addresses):
            for seed, each in enumerate(rate, start=1):
                workload = _workload(load, seed, each, duration)
                run(_reset(addresses))
                measured, clients = _measure(server, workload)
                foretold = foretold_run(trace, workload, engines, policy)
                for name in ("ttft_p50_s", "ttft_p99_s"):
                    foretold[name] += delivery_ms / 1000
                ratios = {
                    name: foretold[name] / measured[name]
                    for name in ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s")
                }
                rows.append(
                    {
                        "rate": each,
                        "measured": measured,
                        "foretold": foretold,
                        "foretold_to_measured": ratios,
                        "hit_rate_difference": foretold["hit_rate"] - measured["hit_rate"],
                        "clients": clients,
                    }
                )
        steps = fit_step_trace(trace)
    settings = {
        "model": model,
        "engines": engines,
        "steps": "real" if real else {"seconds": _STEP_S},
        "options": options,
        "policy": policy,
        "duration_s": duration,
        "workload": [prefixes, prefix_len, input_len, output_len],
        "fit_rate": fit_rate,
        "delivery_ms": delivery_ms,
        "step_model": steps.describe(),
    }
    report({"settings": settings, "loads": rows}, json, _table(rows))
    return 0


@contextlib.contextmanager
def _serving(
    commands: Sequence[Sequence[str]], policy: str, folder: Path
) -> Iterator[tuple[Server, list[str]]]:
    """The daemons and the HTTP server in front of them; the daemons' addresses."""
    environment = plain_environment() | {"STEP_S": ",".join(map(str, _STEP_S))}
    with contextlib.ExitStack() as stack:
        addresses = []
        for number, command in enumerate(commands):
            address = f"ipc://{folder}/{len(commands)}-{number}.sock"
            command = [*command, "--bind", address, "--exit-on-stdin-eof", "--log-level", "error"]
            process = EngineProcess(command, environment, folder / "log", answers=True)
            stack.enter_context(process).ready_answer(START_TIMEOUT_S)
            addresses.append(address)
        command = [sys.executable, "-m", "frontend.cli", "http", "--port", "0"]
        command += ["--routing-policy", policy, "--model", f"fleet={','.join(addresses)}"]
        process = EngineProcess(command, environment, folder / "log", answers=True)
        url = stack.enter_context(process).ready_answer(START_TIMEOUT_S)["url"]
        server = Server.at(url, api="openai")
        warm_up = DatasetOptions(seed=2**32)
        _measure(server, Workload(options=warm_up, units=_UNITS, num_requests=4 * len(addresses)))
        yield server, addresses


def _workload(load: DatasetOptions, seed: int, rate: float, duration_s: float) -> Workload:
    return Workload(
        options=replace(load, seed=seed),
        units=_UNITS,
        arrivals=Arrivals(rate=rate, duration_s=duration_s),
        num_requests=math.ceil(2 * rate * duration_s),
    )


def _measure(server: Server, workload: Workload) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Figures, and facts of the client process. Raises RuntimeError: a request failed."""
    outcome = run_clients(server, OpenLoop(workload), num_processes=1)
    records = outcome.records
    failed = [record.detail for record in records if record.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(records)} requests failed: {failed[0]}")
    start_s, end_s = span_s(records)
    num_prompt = sum(record.num_prompt_tokens for record in records)
    num_output = sum(record.num_output_tokens for record in records)
    figures = {
        "num_requests": len(records),
        "hit_rate": sum(record.num_cached_tokens for record in records) / num_prompt,
        "output_tokens_per_s": num_output / (end_s - start_s),
    }
    ttfts_s = [one.first_token_s - one.due_s for one in records if one.first_token_s is not None]
    return figures | _percentiles(ttfts_s), [client._asdict() for client in outcome.clients]


async def _reset(addresses: Sequence[str]) -> None:
    for address in addresses:
        async with AsyncLLM(address) as llm:
            await llm.reset_prefix_cache()


def _percentiles(ttfts_s: Any) -> dict[str, float]:
    return {f"ttft_p{percent}_s": float(np.percentile(ttfts_s, percent)) for percent in _PERCENT}


def foretold_run(path: Path, workload: Workload, num_engines: int, policy: str) -> dict[str, Any]:
    trace, model = StepTrace(path), NoisyModel(fit_step_trace(path), seed=0)
    requests = [
        TracedRequest(
            index=planned.index,
            arrival_s=planned.arrival_s,
            num_text_tokens=len(planned.prompt),
            num_output_tokens=planned.num_output_tokens,
            token_ids=tuple(map(int, planned.prompt)),  # type: ignore[arg-type]
        )
        for planned in workload
    ]
    metrics = RequestMetrics()
    engines = [
        SimulatedEngine(trace.scheduler_config(), trace.make_cache(), model, metrics)
        for _ in range(num_engines)
    ]
    simulated = Fleet(engines, make_router(policy, 0, trace.block_size))
    simulated.run(requests)
    numbers = [engine.statistics() for engine in engines]
    num_prompt = sum(each.num_prompt_tokens for each in numbers)
    return {
        "num_requests": metrics.num_finished,
        "hit_rate": sum(each.num_cached_prompt_tokens for each in numbers) / num_prompt,
        "output_tokens_per_s": metrics.num_output_tokens
        / (simulated.finished_s - requests[0].arrival_s),
        "requests_an_engine": [engine.counters.num_received for engine in engines],
    } | _percentiles(metrics.latencies("ttft"))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'req/s':>6} {'':<9} {'hits':>7} {'tok/s':>8} {'TTFT p50':>9} {'p99':>9}"]
    for row in rows:
        for name in ("measured", "foretold"):
            one = row[name]
            lines.append(
                f"{row['rate']:>6g} {name:<9} {100 * one['hit_rate']:>6.1f}% "
                f"{one['output_tokens_per_s']:>8.1f} {1000 * one['ttft_p50_s']:>6.0f} ms "
                f"{1000 * one['ttft_p99_s']:>6.0f} ms"
            )
    return "\n".join(lines)
