"""`engine-core plan` and `engine-core simulate`: the options of the simulator's commands.

A table goes to stderr, one JSON document to --json FILE, or to stdout unless that is a terminal."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from engine_core.errors import ConfigurationError
from frontend.cli.options import option
from frontend.load.interrupt import interrupted_by_sigterm
from frontend.load.report import give_document, log
from frontend.load.traces import TraceError
from frontend.simulator import SimulationError, replay, simulation
from frontend.simulator.metrics import as_plan_table, as_table
from frontend.simulator.simulation import Scenario
from frontend.simulator.step_trace import StepTrace, fit_step_trace

app = App(
    name="simulate",
    help="Run the scheduler and cache that serve in virtual time: a trace instead of clients, step "
    "times instead of a model. Exit code 0; 1 if a step trace does not replay to the same "
    "decisions, or no plan is within the SLO; 2 for wrong options or input.",
    default_parameter=Parameter(show=None),
    version_flags=[],
    result_action="return_value",
)


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Errors become those of a command line."""
    with interrupted_by_sigterm():
        try:
            yield
        except (TraceError, ValueError, OSError) as error:
            raise ConfigurationError(str(error)) from error


JsonFile = Annotated[Path | None, Parameter(help="Write the document here, not to stdout.")]
_DEFAULT = Scenario()


@app.command
@_answered()
def run(*, scenario: Scenario = _DEFAULT, json: JsonFile = None) -> int:
    """Serve a trace and report latencies, throughput, cache hits and preemptions."""
    document = simulation.simulate(scenario)
    log(f"{scenario.in_words()}\n{as_table(document)}")
    give_document(document, json)
    return 0


@app.command
@_answered()
def plan(
    *,
    budget: Annotated[
        tuple[int, ...],
        option("Token budgets to try; give it several times.", gte=1),
        Parameter(negative=""),
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


@app.command
@_answered()
def verify(step_trace: Path) -> int:
    """Replay a step trace, and show the first decision that differs."""
    replayed = replay.verify(StepTrace(step_trace))
    if replayed.difference is not None:
        print(replayed.difference)  # noqa: T201
        return 1
    print(  # noqa: T201
        f"{replayed.num_steps} steps of {replayed.num_requests} requests: "
        "every decision is the recorded one"
    )
    return 0


@app.command
@_answered()
def fit(step_trace: Path, *, json: JsonFile = None) -> int:
    """Fit step times to a step trace, and say how well they fit."""
    model = fit_step_trace(step_trace)
    error = f"mean relative error {100 * model.mean_relative_error:.1f} %"
    log(f"{model.num_steps} steps of {step_trace}, {error}; --json FILE or a pipe has the times")
    give_document(model.describe(), json)
    return 0


@app.command
@_answered()
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
