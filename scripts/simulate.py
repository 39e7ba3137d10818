"""Runs the production scheduler and cache in virtual time: a trace instead of clients, step
times instead of a model.

    python scripts/simulate.py run --rate 20 --engines 8 --router cache-aware
    python scripts/simulate.py plan --rate 20 --slo-ttft-ms 500 --slo-tpot-ms 30
    python scripts/simulate.py verify STEP_TRACE

A table goes to stderr, one JSON document to --json FILE, or to stdout unless that is a terminal.
Exit code 0, 1 if a step trace does not replay to the same decisions or no plan is within the SLO,
2 for wrong options or input, 130 after Ctrl-C.
"""

import functools
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command_line import make_app, option, run_app
from scripts.load.report import give_document, log
from scripts.simulator import SimulationError, replay, simulation
from scripts.simulator.metrics import as_plan_table, as_table
from scripts.simulator.simulation import Scenario
from scripts.simulator.step_trace import StepTrace, fit_step_trace
from scripts.traces import TraceError

app = make_app("simulate", __doc__)

JsonFile = Annotated[Path | None, Parameter(help="Write the document here, not to stdout.")]
_DEFAULT = Scenario()


@app.command(help_epilogue="")
def run(*, scenario: Scenario = _DEFAULT, json: JsonFile = None) -> int:
    """Serve a trace and report latencies, throughput, cache hits and preemptions."""
    document = simulation.simulate(scenario)
    log(f"{scenario.in_words()}\n{as_table(document)}")
    give_document(document, json)
    return 0


@app.command(help_epilogue="")
def plan(
    *,
    budget: Annotated[
        tuple[int, ...],
        option("Token budgets to try; give it several times.", gte=1),
    ] = (512, 2048, 8192),
    max_replicas: Annotated[int, option("Most replicas to try.", gte=1)] = 64,
    processes: Annotated[int | None, Parameter(help="Default: one a core.")] = None,
    scenario: Scenario = _DEFAULT,
    json: JsonFile = None,
) -> int:
    """The fewest replicas, and the token budget, with p99 TTFT below --slo-ttft-ms and p99 TPOT
    below --slo-tpot-ms."""
    engines, tokens = scenario.fleet.engines, scenario.engine.max_num_batched_tokens
    what = "--{} is {}, and a plan looks for it; give --{}".format
    if engines != _DEFAULT.fleet.engines:
        raise SimulationError(what("engines", engines, "max-replicas"))
    if tokens != _DEFAULT.engine.max_num_batched_tokens:
        raise SimulationError(what("max-num-batched-tokens", tokens, "budget"))
    document = simulation.plan(scenario, budget, max_replicas, processes)
    log(f"{scenario.in_words()}\n{as_plan_table(document)}")
    give_document(document, json)
    return 0 if document["best"] is not None else 1


@app.command(help_epilogue="")
def verify(step_trace: Path) -> int:
    """Replay a step trace, and show the first decision that differs."""
    replayed = replay.verify(StepTrace(step_trace))
    if replayed.difference is not None:
        print(replayed.difference)
        return 1
    print(
        f"{replayed.num_steps} steps of {replayed.num_requests} requests: "
        "every decision is the recorded one"
    )
    return 0


@app.command(help_epilogue="")
def fit(step_trace: Path, *, json: JsonFile = None) -> int:
    """Fit step times to a step trace, and say how well they fit."""
    model = fit_step_trace(step_trace)
    error = f"mean relative error {100 * model.mean_relative_error:.1f} %"
    log(f"{model.num_steps} steps of {step_trace}, {error}; --json FILE or a pipe has the times")
    give_document(model.describe(), json)
    return 0


@app.command(help_epilogue="")
def validate(
    step_trace: Path,
    *,
    fit_on: Annotated[
        Path | None, Parameter(help="Fit step times on this step trace; default: on the same.")
    ] = None,
    json: JsonFile = None,
) -> int:
    """Simulate a step trace's arrivals; compare throughput, TTFT and TPOT with those recorded."""
    model = fit_step_trace(fit_on or step_trace)
    document = replay.validate(StepTrace(step_trace), model)
    log(f"step times of {fit_on or step_trace}\n{replay.as_table(document)}")
    give_document(document, json)
    return 0


main = functools.partial(run_app, app, refused=(SimulationError, TraceError, ValueError, OSError))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
