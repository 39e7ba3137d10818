"""Engines in alternation, A B A B: in a round each engine is launched, warmed up, asked every
workload, and ended.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from scripts.comparison.engines import Conditions, Engine, NotMeasured, Running
from scripts.comparison.figures import Figures, Incomplete, figures_of
from scripts.comparison.processes import EngineFailed, MemoryWatch
from scripts.comparison.workloads import Workload

START = "start"
_MB = 1e6


@dataclasses.dataclass
class EngineRound:
    """What came of one engine in one round.

    Attributes:
        figures: by workload, of those that were served in full; "start" for launch and memory.
        failed: by workload, or "start", why there are none.
        not_measured: by workload, why it does not apply.
        facts: what the engine said about itself.
    """

    engine: str
    round: int
    figures: dict[str, Figures] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    not_measured: dict[str, str] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def run_rounds(
    engines: Sequence[Engine],
    rounds: Sequence[Sequence[Workload]],
    warm_up: Sequence[Workload],
    conditions: Conditions,
    *,
    report: Callable[[str], None],
) -> list[EngineRound]:
    """One engine after the other, in the order given. An engine that did not start is not started
    again; one that failed in a workload is asked the next all the same.

    Args:
        warm_up: the first of them gives the time from launch to the first token.
    """
    done: list[EngineRound] = []
    not_started: dict[str, str] = {}
    for number, workloads in enumerate(rounds):
        for engine in engines:
            one = EngineRound(engine.name, number)
            done.append(one)
            if engine.name in not_started:
                one.failed[START] = f"not tried again: {not_started[engine.name]}"
                continue
            report(f"round {number + 1} of {len(rounds)}: {engine.name}")
            try:
                with MemoryWatch() as memory, engine.launch(conditions) as running:
                    one.facts = running.facts
                    one.figures[START] = warm_up_figures(running, warm_up)
                    for workload in workloads:
                        _ask(one, running, workload, report)
                    if running.ready_s is not None:
                        one.figures[START] |= {
                            "peak_engine_mb": memory.peak_engine_bytes / _MB,
                            "peak_all_mb": memory.peak_all_bytes / _MB,
                        }
            except EngineFailed as error:
                one.failed[START] = not_started[engine.name] = str(error)
                report(f"  failed to start: {error}")
    return done


def warm_up_figures(running: Running, warm_up: Sequence[Workload]) -> Figures:
    """Seconds from launch to ready and to the first token; none of an engine that was up before.

    Raises:
        EngineFailed: it does not serve a workload in full.
    """
    figures: Figures = {}
    if running.ready_s is not None:
        figures["launch_to_ready_s"] = running.ready_s
    for workload in warm_up:
        try:
            served = figures_of(workload, running.run(workload))
        except NotMeasured:
            continue
        except Incomplete as error:
            raise EngineFailed(f"it does not serve {workload.name}: {error}") from error
        if running.ready_s is not None and workload is warm_up[0]:
            # the client's own start is not counted, only what the request took
            figures["launch_to_first_token_s"] = running.ready_s + served["duration_s"]
    return figures


def _ask(
    one: EngineRound, running: Running, workload: Workload, report: Callable[[str], None]
) -> None:
    name = workload.name
    try:
        one.figures[name] = figures = figures_of(workload, running.run(workload))
    except NotMeasured as error:
        one.not_measured[name] = str(error)
    except (EngineFailed, Incomplete) as error:
        one.failed[name] = str(error)
        report(f"  {name} failed: {error}")
    else:
        report(f"  {name}: {figures['output_tok_s']:.1f} output tok/s")
