"""Engines in turn: A B A B. Each turn launches an engine, warms it up, asks everything, ends it.

Owns the order and what is told of failures. Must not know kinds of engines, nor how figures print.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from typing import Any

from scripts.comparison.figures import Figures, Incomplete, figures_of
from scripts.comparison.launching import Conditions, NotMeasured, Running, System, SystemFailed
from scripts.comparison.processes import MemoryWatch, children_of_this_process
from scripts.comparison.workloads import Workload

_MB = 1e6
Report = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class Turn:
    """What came of one engine's turn.

    Attributes:
        figures: by workload, of those that were served in full; "start" for launch and memory.
        failed: by workload, or "start", why there are none.
        not_measured: by workload, why it does not apply.
        facts: what the engine said of itself.
    """

    system: str
    number: int
    figures: dict[str, Figures] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    not_measured: dict[str, str] = dataclasses.field(default_factory=dict)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


def run_turns(
    systems: Sequence[System],
    turns: Sequence[Sequence[Workload]],
    warm_up: Sequence[Workload],
    conditions: Conditions,
    *,
    report: Report,
) -> list[Turn]:
    """One after the other, in the order given, as often as there are turns. An engine that did not
    start is not started again; of one that failed in a workload the next is asked all the same.

    Args:
        warm_up: the first of them gives the time from launch to the first token.
    """
    done: list[Turn] = []
    dead: dict[str, str] = {}
    for number, workloads in enumerate(turns):
        for system in systems:
            turn = Turn(system.name, number)
            done.append(turn)
            if system.name in dead:
                turn.failed["start"] = f"not tried again: {dead[system.name]}"
                continue
            report(f"turn {number + 1} of {len(turns)}: {system.name}")
            try:
                _take_turn(turn, system, workloads, warm_up, conditions, report)
            except SystemFailed as error:
                turn.failed["start"] = dead[system.name] = str(error)
                report(f"  failed to start: {error}")
    return done


def _take_turn(
    turn: Turn,
    system: System,
    workloads: Sequence[Workload],
    warm_up: Sequence[Workload],
    conditions: Conditions,
    report: Report,
) -> None:
    resource_tracker.ensure_running()  # a process of multiprocessing's own, which is nobody's
    before = children_of_this_process()

    def roots() -> dict[str, set[int]]:
        clients = {one.pid for one in multiprocessing.active_children() if one.pid is not None}
        return {"engine": children_of_this_process() - before - clients, "clients": clients}

    with MemoryWatch(roots) as memory, system.launch(conditions) as running:
        turn.facts = running.facts
        turn.figures["start"] = _warm_up(running, warm_up)
        for workload in workloads:
            _ask(turn, running, workload, report)
        if running.is_ours_to_end:
            peaks = memory.peaks_bytes
            turn.figures["start"] |= {
                "peak_engine_mb": peaks["engine"] / _MB,
                "peak_all_mb": peaks["all"] / _MB,
            }


def _warm_up(running: Running, warm_up: Sequence[Workload]) -> Figures:
    start: Figures = {}
    if running.ready_s is not None:
        start["launch_to_ready_s"] = running.ready_s
    for workload in warm_up:
        try:
            figures = figures_of(workload, running.run(workload))
        except NotMeasured:  # what it cannot be asked warms nothing up
            continue
        except Incomplete as error:
            raise SystemFailed(f"it does not serve {workload.name}: {error}") from error
        if running.ready_s is not None and workload is warm_up[0]:
            # the client's own start is not counted, only what the request took
            start["launch_to_first_token_s"] = running.ready_s + figures["duration_s"]
    return start


def _ask(turn: Turn, running: Running, workload: Workload, report: Report) -> None:
    name = workload.name
    try:
        turn.figures[name] = figures = figures_of(workload, running.run(workload))
    except NotMeasured as error:
        turn.not_measured[name] = str(error)
    except (SystemFailed, Incomplete) as error:
        turn.failed[name] = str(error)
        report(f"  {name} failed: {error}")
    else:
        report(f"  {name}: {figures['output_tok_s']:.1f} output tok/s")
