"""A comparison's summary, and its table for people."""

from collections.abc import Sequence
from typing import Any

from scripts.comparison.figures import Figures, medians, ratios, rounded
from scripts.comparison.rounds import START, EngineRound

_COLUMNS = {
    "W1": ("output_tok_s", "total_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"),
    "W2": ("decode_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"),
    "W3": ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "output_tok_s"),
    "W4": ("output_tok_s", "total_tok_s", "ttft_p50_ms", "itl_p99_ms"),
    "prefill": ("prefill_tok_s", "ttft_p50_ms"),
    START: ("launch_to_ready_s", "launch_to_first_token_s", "peak_engine_mb", "peak_all_mb"),
}


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
