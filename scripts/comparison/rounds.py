"""Engines in alternation, A B A B: in a round each engine is launched, warmed up, asked every
workload, and ended; or all are up at once, and each workload goes from one to the next."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from scripts.comparison.engines import Conditions, Engine, NotMeasured, Running
from scripts.comparison.figures import Figures, Incomplete, figures_of, medians, ratios, rounded
from scripts.comparison.processes import EngineFailed, peak_memory_bytes, process_tree
from scripts.comparison.workloads import Workload

START = "start"
_MB = 1e6
_COLUMNS = {
    "W1": ("output_tok_s", "total_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"),
    "W2": ("decode_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"),
    "W3": ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "output_tok_s"),
    "W4": ("output_tok_s", "total_tok_s", "ttft_p50_ms", "itl_p99_ms"),
    "prefill": ("prefill_tok_s", "ttft_p50_ms"),
    START: ("launch_to_ready_s", "launch_to_first_token_s", "peak_engine_mb"),
}


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
    `warm_up`: the first of them gives the time from launch to the first token."""
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
                with engine.launch(conditions) as running:
                    one.facts = running.facts
                    one.figures[START] = warm_up_figures(running, warm_up)
                    for workload in workloads:
                        _ask(one, running, workload, report)
                    if running.pid is not None:
                        peaks = map(peak_memory_bytes, process_tree(running.pid))
                        one.figures[START]["peak_engine_mb"] = sum(peaks) / _MB
            except EngineFailed as error:
                one.failed[START] = not_started[engine.name] = str(error)
                report(f"  failed to start: {error}")
    return done


def run_resident_rounds(
    engines: Sequence[Engine],
    rounds: Sequence[Sequence[Workload]],
    warm_up: Sequence[Workload],
    conditions: Conditions,
    *,
    report: Callable[[str], None],
) -> list[EngineRound]:
    """All engines are launched once and stay, so that those of a ratio are asked seconds apart,
    every other round in the opposite order. Launch is told in the first round, beside the engines
    that are up already; memory is not. Likewise for engines that fail."""
    by_round = [
        [EngineRound(engine.name, number) for engine in engines] for number in range(len(rounds))
    ]
    up: dict[str, Running] = {}
    with ExitStack() as stack:
        for one, engine in zip(by_round[0], engines, strict=True):
            report(f"launch: {engine.name}")
            try:
                running = stack.enter_context(engine.launch(conditions))
                one.facts = running.facts
                one.figures[START] = warm_up_figures(running, warm_up)
                up[engine.name] = running
            except EngineFailed as error:
                one.failed[START] = str(error)
                report(f"  failed to start: {error}")
        for number, (workloads, ones) in enumerate(zip(rounds, by_round, strict=True)):
            asked = [one for one in ones if one.engine in up]
            for workload in workloads:
                for one in reversed(asked) if number % 2 else asked:
                    report(f"round {number + 1} of {len(rounds)}: {one.engine}")
                    _ask(one, up[one.engine], workload, report)
    return [one for ones in by_round for one in ones]


def warm_up_figures(running: Running, warm_up: Sequence[Workload]) -> Figures:
    """Seconds from launch to ready and to the first token; none of an engine that was up before.
    Raises EngineFailed: it does not serve a workload in full."""
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


# ---------------------------------------------------------------------- report


def summarise_rounds(
    done: Sequence[EngineRound], own: Sequence[str], names: Sequence[str]
) -> dict[str, Any]:
    """Medians by engine and workload, ratios of each of our own to each other engine, failures, and
    each round's figures."""
    workloads = list(dict.fromkeys(workload for one in done for workload in one.figures))
    by_engine = {
        name: {w: [one.figures.get(w) for one in done if one.engine == name] for w in workloads}
        for name in names
    }
    return {
        "medians": {
            name: {
                workload: rounded(medians(measured)) | {"num_rounds": len(measured)}
                for workload, rounds in by_workload.items()
                if (measured := [figures for figures in rounds if figures is not None])
            }
            for name, by_workload in by_engine.items()
        },
        "ratios": {
            f"{ours} / {other}": {
                workload: rounded(found)
                for workload in workloads
                if (found := ratios(by_engine[ours][workload], by_engine[other][workload]))
            }
            for ours in own
            for other in names
            if other != ours
        },
        **{
            kind: [
                {"engine": one.engine, "round": one.round, "workload": workload, "reason": reason}
                for one in done
                for workload, reason in getattr(one, kind).items()
            ]
            for kind in ("failed", "not_measured")
        },
        "rounds": [
            {
                "engine": one.engine,
                "round": one.round,
                "figures": {name: rounded(figures) for name, figures in one.figures.items()},
                "facts": one.facts,
            }
            for one in done
        ],
    }


def as_table(summary: dict[str, Any]) -> str:
    """Medians by workload with a row for each engine, then the ratios, then what failed."""
    lines: list[str] = []
    workloads = {name for found in summary["medians"].values() for name in found}
    for workload in sorted(workloads, key=lambda name: (name == START, name)):
        columns = _COLUMNS.get(workload.partition("@")[0], _COLUMNS["W1"])
        lines += ["", _row(workload, columns)]
        for kind, mark in (("medians", ""), ("ratios", "x")):
            for name, found in summary[kind].items():
                if workload in found:
                    lines.append(
                        _row(f"  {name}", [_cell(found[workload], c, mark) for c in columns])
                    )
    for kind in ("failed", "not_measured"):
        for one in summary[kind]:
            lines.append(
                f"{kind.replace('_', ' ')}: {one['engine']}, round {one['round'] + 1}, "
                f"{one['workload']}: {one['reason']}"
            )
    lines.append("x: how many times better, the median of each round's own ratio; above 1 is ours")
    return "\n".join(lines)


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<34}" + "".join(f"{cell:>24}" for cell in cells)


def _cell(figures: Figures, name: str, mark: str) -> str:
    return f"{figures[name]:,.2f}{mark}" if name in figures else "-"
