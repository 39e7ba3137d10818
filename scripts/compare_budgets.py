"""Does a budget that follows a target break fewer promises than every fixed one?

    python scripts/compare_budgets.py simulate                 virtual time, H200 + Llama-3.1-8B
    python scripts/compare_budgets.py serve --model NAME       a real daemon for each setting

The same traces are served with `--slo-tpot-ms` (and `--slo-ttft-ms`) and with fixed token
budgets, one after the other. Counted are requests whose time to first token or whose mean time per
output token was above its target, and output tokens a second. A table goes to stderr, one JSON
document to the file or to stdout.
"""

import asyncio
import dataclasses
import json as json_module
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from scripts.benchmark_report import describe_run
from scripts.budgets.daemons import serve_in_turns
from scripts.budgets.promises import Promise, Served, table
from scripts.simulator.options import EngineOptions, FleetOptions, TraceOptions
from scripts.simulator.simulation import Scenario, simulate

BUDGETS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
_MAX_BUDGET = 8192

app = App(name="compare_budgets", help=__doc__, result_action="return_value")
JsonFile = Annotated[Path | None, Parameter(help="Write the document here, not to stdout.")]


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
    *, slo_tpot_ms: float = 15.0, slo_ttft_ms: float = 1000.0, json: JsonFile = None
) -> int:
    """Four synthetic traces on a simulated H200 with Llama-3.1-8B."""
    promise = Promise(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    traces = {}
    for name, trace in _SIMULATED.items():
        rows = []
        for budget in (*BUDGETS, None):
            engine = EngineOptions(max_num_batched_tokens=budget or _MAX_BUDGET)
            if budget is None:
                engine = dataclasses.replace(
                    engine, slo_tpot_ms=slo_tpot_ms, slo_ttft_ms=slo_ttft_ms
                )
            outcome = simulate(Scenario(trace=trace, engine=engine, fleet=FleetOptions()))
            figures = zip(*outcome.metrics.figures("ttft", "tpot"), strict=True)
            served = [Served(float(ttft), float(tpot), 0) for ttft, tpot in figures]
            requests = outcome.document["requests"]
            row = promise.row(_name(budget), served, requests["duration_s"])
            row["output_tokens_per_s"] = round(requests["throughput"]["output_tokens_per_s"], 1)
            rows.append(row)
        traces[name] = rows
        print(table(name, rows), file=sys.stderr)
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
    slo_tpot_ms: float = 100.0,
    slo_ttft_ms: float = 1500.0,
    only: Annotated[str, Parameter(help="Traces whose name begins so; default: all.")] = "",
    json: JsonFile = None,
) -> int:
    """Three synthetic traces on this machine: a daemon for each setting, all up at once, serve the
    same requests in turns of half a minute, so that a slow minute is nobody's alone."""
    promise = Promise(slo_ttft_ms / 1e3, slo_tpot_ms / 1e3)
    settings: dict[str, dict[str, Any]] = {
        _name(budget): {"max_num_batched_tokens": budget or _MAX_BUDGET, "num_blocks": 1024}
        for budget in (*BUDGETS, None)
    }
    settings[_name(None)] |= {"slo_tpot_ms": slo_tpot_ms, "slo_ttft_ms": slo_ttft_ms}
    traces = {
        name: [requests[first : first + turn] for first in range(0, num_requests, turn)]
        for name, trace in _served_traces(num_requests, load).items()
        for requests in [list(trace.make(2048))]
        if name.startswith(only)
    }
    if not traces:
        names = ", ".join(f'"{name}"' for name in _served_traces(num_requests, load))
        raise SystemExit(f'--only "{only}" begins no trace; there are {names}')
    rows = asyncio.run(serve_in_turns(model, settings, traces, promise))
    return _finish({"setting": f"daemon on this machine: {model}"}, promise, rows, json)


# ---------------------------------------------------------------------- the document


def _name(budget: int | None) -> str:
    return "target" if budget is None else str(budget)


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
