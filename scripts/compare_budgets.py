"""Does a budget that follows a target break fewer promises than every fixed one?

    python scripts/compare_budgets.py simulate                 virtual time, H200 + Llama-3.1-8B
    python scripts/compare_budgets.py serve --model NAME       a real daemon for each setting

The same traces are served with `--target-tpot-ms` (and `--target-ttft-ms`) and with fixed token
budgets, one after the other. Counted are requests whose time to first token or whose mean time per
output token was above its target, and output tokens a second. A table goes to stderr, one JSON
document to the file or to stdout.
"""

import asyncio
import contextlib
import dataclasses
import json as json_module
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frontend import AsyncLLM, RequestOutputKind, SamplingParams
from scripts.benchmark_report import describe_run
from scripts.load.records import percentile
from scripts.simulator.options import EngineOptions, FleetOptions, TraceOptions
from scripts.simulator.simulation import Scenario, simulate
from scripts.simulator.trace import TraceRequest

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MAX_BUDGET = 8192

app = App(name="compare_budgets", help=__doc__, result_action="return_value")
JsonFile = Annotated[Path | None, Parameter(help="Write the document here, not to stdout.")]


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it; seconds."""

    ttft_s: float
    tpot_s: float
    """NaN for an answer of one token."""
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    ttft_s: float
    tpot_s: float

    def row(self, setting: str, served: Sequence[Served], duration_s: float) -> dict[str, Any]:
        """What was broken under one setting."""
        late = [one.ttft_s > self.ttft_s for one in served]
        slow = [one.tpot_s > self.tpot_s for one in served]
        return {
            "budget": setting,
            "num_requests": len(served),
            "ttft_broken": sum(late),
            "tpot_broken": sum(slow),
            "requests_broken": sum(map(max, late, slow)),
            "output_tokens_per_s": round(
                sum(one.num_output_tokens for one in served) / duration_s, 1
            ),
            "ttft_p99_ms": round(1e3 * _percentile([one.ttft_s for one in served], 99), 1),
            "tpot_p99_ms": round(1e3 * _percentile([one.tpot_s for one in served], 99), 1),
        }


def _percentile(values: Sequence[float], percent: float) -> float:
    return percentile(sorted(value for value in values if not math.isnan(value)), percent)


# ---------------------------------------------------------------------- virtual time


_SIMULATED: dict[str, TraceOptions] = {
    "poisson": TraceOptions(
        rate=13,
        prompt_len="lognormal:1200:1.0:16000",
        output_len="lognormal:150:0.8:1000",
        num_requests=3000,
    ),
    "bursts (gamma, CV 3)": TraceOptions(
        rate=12,
        arrivals="gamma",
        burstiness=3.0,
        prompt_len="lognormal:1200:1.0:16000",
        output_len="lognormal:150:0.8:1000",
        num_requests=3000,
    ),
    "diurnal, long prompts": TraceOptions(
        rate=6,
        arrivals="diurnal",
        swing=0.8,
        period=120.0,
        prompt_len="lognormal:3000:0.8:32000",
        output_len="lognormal:200:0.6:1000",
        num_requests=2000,
    ),
    "chats with system prompts": TraceOptions(
        rate=7,
        turns=4.0,
        think=6.0,
        prefixes=8,
        prefix_len=1024,
        prompt_len="lognormal:400:1.2:8000",
        output_len="lognormal:200:0.8:1000",
        num_requests=3000,
    ),
}


@app.command(name="simulate")
def simulate_budgets(
    *, target_tpot_ms: float = 15.0, target_ttft_ms: float = 1000.0, json: JsonFile = None
) -> int:
    """Four synthetic traces on a simulated H200 with Llama-3.1-8B."""
    promise = Promise(target_ttft_ms / 1e3, target_tpot_ms / 1e3)
    traces = {}
    for name, trace in _SIMULATED.items():
        rows = []
        for budget in (*BUDGETS, None):
            engine = EngineOptions(max_num_batched_tokens=budget or _MAX_BUDGET)
            if budget is None:
                engine = dataclasses.replace(
                    engine, target_tpot_ms=target_tpot_ms, target_ttft_ms=target_ttft_ms
                )
            outcome = simulate(Scenario(trace=trace, engine=engine, fleet=FleetOptions()))
            figures = zip(*outcome.metrics.figures("ttft", "tpot"), strict=True)
            served = [Served(float(ttft), float(tpot), 0) for ttft, tpot in figures]
            requests = outcome.document["requests"]
            row = promise.row(_name(budget), served, requests["duration_s"])
            row["output_tokens_per_s"] = round(requests["throughput"]["output_tokens_per_s"], 1)
            rows.append(row)
        traces[name] = rows
        print(_table(name, rows), file=sys.stderr)
    setting = "simulated: H200, Llama-3.1-8B bf16, roofline"
    return _finish({"setting": setting}, promise, traces, json)


# ---------------------------------------------------------------------- a real daemon


def _served_traces(num_requests: int, load: float) -> dict[str, TraceOptions]:
    return {
        "poisson": TraceOptions(
            rate=1.8 * load,
            prompt_len="log-uniform:32:512",
            output_len="32",
            num_requests=num_requests,
        ),
        "bursts (gamma, CV 1.5)": TraceOptions(
            rate=1.4 * load,
            arrivals="gamma",
            burstiness=1.5,
            prompt_len="log-uniform:32:512",
            output_len="32",
            num_requests=num_requests,
        ),
        "some long prompts": TraceOptions(
            rate=1.2 * load,
            prompt_len="lognormal:150:0.8:1500",
            output_len="log-uniform:16:64",
            num_requests=num_requests,
        ),
    }


@app.command
def serve(
    *,
    model: str = "smollm2-135m-instruct",
    num_requests: int = 120,
    turn: Annotated[int, Parameter(help="Requests that a setting serves in its turn.")] = 24,
    load: Annotated[float, Parameter(help="Times the rates that suit two cores.")] = 1.0,
    target_tpot_ms: float = 100.0,
    target_ttft_ms: float = 1500.0,
    only: Annotated[str, Parameter(help="Traces whose name begins so; default: all.")] = "",
    json: JsonFile = None,
) -> int:
    """Three synthetic traces on this machine: a daemon for each setting, all up at once, serve the
    same requests in turns of half a minute, so that a slow minute is nobody's alone."""
    promise = Promise(target_ttft_ms / 1e3, target_tpot_ms / 1e3)
    settings: dict[str, dict[str, Any]] = {
        _name(budget): {"max_num_batched_tokens": budget or _MAX_BUDGET, "num_blocks": 1024}
        for budget in (*BUDGETS, None)
    }
    settings[_name(None)] |= {"target_tpot_ms": target_tpot_ms, "target_ttft_ms": target_ttft_ms}
    traces = {
        name: [requests[first : first + turn] for first in range(0, num_requests, turn)]
        for name, trace in _served_traces(num_requests, load).items()
        for requests in [list(trace.make(2048))]
        if name.startswith(only)
    }
    rows = asyncio.run(_serve(model, settings, traces, promise))
    return _finish({"setting": f"daemon on this machine: {model}"}, promise, rows, json)


async def _serve(
    model: str,
    settings: dict[str, dict[str, Any]],
    traces: dict[str, list[list[TraceRequest]]],
    promise: Promise,
) -> dict[str, list[dict[str, Any]]]:
    """Rows of each trace, one for each setting."""
    rows: dict[str, list[dict[str, Any]]] = {}
    async with contextlib.AsyncExitStack() as daemons:
        llms = {}
        for name, options in settings.items():
            llms[name] = await AsyncLLM.launch(model, **options)
            daemons.push_async_callback(llms[name].close)
            # first touches are paid for before, and what a budget learns of a device once
            await _replay(llms[name], next(iter(traces.values()))[-1])
        for trace, turns in traces.items():
            served: dict[str, list[Served]] = {name: [] for name in settings}
            durations_s = dict.fromkeys(settings, 0.0)
            for number, requests in enumerate(turns):
                # everyone comes first, and after everyone else, at some time
                names = list(settings)
                random.Random(number).shuffle(names)
                for name in names:
                    seen, duration_s = await _replay(llms[name], requests)
                    served[name] += seen
                    durations_s[name] += duration_s
                    told = promise.row(name, seen, duration_s)
                    print(trace, number, told, file=sys.stderr, flush=True)
            rows[trace] = []
            for name, seen in served.items():
                row = promise.row(name, seen, durations_s[name])
                row["ttft_and_tpot_ms"] = [
                    [round(1e3 * one.ttft_s, 1), round(1e3 * one.tpot_s, 1)] for one in seen
                ]
                rows[trace].append(row)
            print(_table(trace, rows[trace]), file=sys.stderr, flush=True)
    return rows


async def _replay(llm: AsyncLLM, requests: list[TraceRequest]) -> tuple[list[Served], float]:
    """Serves them in real time, until the last answer is there. Prompts are random tokens: nothing
    is found in the cache."""
    draw = random.Random()
    prompts = [
        [draw.randrange(100, 40_000) for _ in range(request.num_prompt_tokens)]
        for request in requests
    ]
    start = time.monotonic() + 0.1 - requests[0].arrival_s
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                _one(llm, prompt, request.num_output_tokens, start + request.arrival_s)
            )
            for prompt, request in zip(prompts, requests, strict=True)
        ]
    return [task.result() for task in tasks], time.monotonic() - start - requests[0].arrival_s


async def _one(llm: AsyncLLM, prompt: list[int], num_output_tokens: int, due: float) -> Served:
    await asyncio.sleep(due - time.monotonic())
    params = SamplingParams(
        temperature=0.0,
        max_tokens=num_output_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    first = last = math.nan
    count = 0
    async for output in llm.generate({"prompt_token_ids": prompt}, params):
        num_new = sum(len(part.token_ids) for part in output.outputs)
        if num_new:
            last = time.monotonic()
            first = last if count == 0 else first
            count += num_new
    tpot_s = (last - first) / (count - 1) if count > 1 else math.nan
    return Served(first - due, tpot_s, count)


# ---------------------------------------------------------------------- the document


def _name(budget: int | None) -> str:
    return "target" if budget is None else str(budget)


def _table(name: str, rows: list[dict[str, Any]]) -> str:
    keys = [key for key, value in rows[0].items() if not isinstance(value, list)]
    lines = [f"{name}: {rows[0]['num_requests']} requests", "  ".join(f"{key:>19}" for key in keys)]
    lines += ["  ".join(f"{row[key]!s:>19}" for key in keys) for row in rows]
    return "\n".join(lines) + "\n"


def _finish(
    setting: dict[str, Any],
    promise: Promise,
    traces: dict[str, list[dict[str, Any]]],
    path: Path | None,
) -> int:
    document = describe_run() | setting | {"target": dataclasses.asdict(promise), "traces": traces}
    text = json_module.dumps(document)
    if path is None:
        print(text)
    else:
        path.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(app())
