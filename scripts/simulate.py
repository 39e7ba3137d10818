"""Runs the production scheduler and cache in virtual time: a trace and a step-time model instead of
clients and a model.

    python scripts/simulate.py run --rate 20 --turns 4 --engines 8 --router cache-aware
    python scripts/simulate.py plan --rate 20 --slo-ttft-ms 500 --slo-tpot-ms 30
    python scripts/simulate.py verify RECORD

A table goes to stderr, one JSON document to --json FILE or to stdout. Exit code 0, 1 if a record
does not replay to the same decisions or no plan holds, 2 for wrong options or input, 130 after
Ctrl-C.
"""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

# `python scripts/simulate.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.simulator import pictures as drawing
from scripts.simulator import planner, replay, validation
from scripts.simulator.errors import SimulationError
from scripts.simulator.options import EngineOptions, FleetOptions, StepTimeOptions, TraceOptions
from scripts.simulator.records import RunRecord, fit_record
from scripts.simulator.report import as_json, as_plan_table, as_table
from scripts.simulator.simulation import Scenario, simulate

app = App(name="simulate", help=__doc__, help_format="plaintext", result_action="return_value")

JsonFile = Annotated[Path | None, Parameter(help="Write the document here, not to stdout.")]


@app.command
def run(
    *,
    trace: TraceOptions | None = None,
    engine: EngineOptions | None = None,
    step_times: StepTimeOptions | None = None,
    fleet: FleetOptions | None = None,
    json: JsonFile = None,
    pictures: Annotated[Path | None, Parameter(help="Folder for pictures of the run.")] = None,
) -> int:
    """Serve a trace and report latencies, throughput, cache hits and preemptions."""
    scenario = _scenario(trace, engine, step_times, fleet)
    outcome = simulate(scenario, with_timeline=pictures is not None)
    print(as_table(outcome.document), file=sys.stderr)
    if pictures is not None and outcome.timeline is not None:
        for path in drawing.draw(pictures, outcome.metrics, outcome.timeline):
            print(f"picture: {path}", file=sys.stderr)
    _write(as_json(outcome.document), json)
    return 0


@app.command
def plan(
    *,
    budget: Annotated[
        tuple[int, ...], Parameter(help="Token budgets to try; give it several times.")
    ] = (512, 2048, 8192),
    max_replicas: Annotated[int, Parameter(help="Give up beyond so many.")] = 64,
    processes: Annotated[int | None, Parameter(help="Default: one a core.")] = None,
    trace: TraceOptions | None = None,
    engine: EngineOptions | None = None,
    step_times: StepTimeOptions | None = None,
    fleet: FleetOptions | None = None,
    json: JsonFile = None,
) -> int:
    """The fewest replicas, and the token budget, that hold p99 TTFT below --slo-ttft-ms and p99
    TPOT below --slo-tpot-ms."""
    scenario = _scenario(trace, engine, step_times, fleet)
    document = planner.plan(scenario, budget, max_replicas, processes)
    print(as_plan_table(document), file=sys.stderr)
    _write(as_json(document), json)
    return 0 if document["best"] is not None else 1


@app.command
def verify(record: Path) -> int:
    """Decide a recorded run again, and show the first decision that differs."""
    verification = replay.verify(RunRecord(record))
    if verification.difference is not None:
        print(verification.difference)
        return 1
    print(
        f"{verification.num_steps} steps of {verification.num_requests} requests: "
        "every decision is the recorded one"
    )
    return 0


@app.command
def fit(record: Path, *, json: JsonFile = None) -> int:
    """Fit a step-time model to a record and say how well it fits."""
    model = fit_record(record)
    description = model.describe()
    print(
        f"{model.num_steps} steps, mean relative error {100 * model.mean_relative_error:.1f} %",
        file=sys.stderr,
    )
    _write(as_json(description), json)
    return 0


@app.command
def validate(
    record: Path,
    *,
    fit_on: Annotated[
        Path | None, Parameter(help="Fit step times on this record; default: on the same.")
    ] = None,
    json: JsonFile = None,
) -> int:
    """Simulate a record's own arrivals, and compare throughput and TTFT with the recorded ones."""
    document = validation.validate(RunRecord(record), fit_record(fit_on or record))
    print(validation.as_table(document), file=sys.stderr)
    _write(as_json(document), json)
    return 0


def _scenario(
    trace: TraceOptions | None,
    engine: EngineOptions | None,
    step_times: StepTimeOptions | None,
    fleet: FleetOptions | None,
) -> Scenario:
    return Scenario(
        trace=trace or TraceOptions(),
        engine=engine or EngineOptions(),
        step_times=step_times or StepTimeOptions(),
        fleet=fleet or FleetOptions(),
    )


def _write(text: str, path: Path | None) -> None:
    if path is None:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text)
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror}") from None


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    try:
        return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except (CycloptsError, SimulationError, ValueError) as error:
        print(f"simulate: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
