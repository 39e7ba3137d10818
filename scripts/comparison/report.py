"""What a comparison is told as: a table for people, one JSON document for programs.

Must not know how anything was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.comparison.figures import Figures, medians, ratios, rounded
from scripts.comparison.turns import Turn

START = "start"
_SHOWN = {
    "W1": ("output_tok_s", "total_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"),
    "W2": ("decode_tok_s", "ttft_p50_ms", "itl_p50_ms", "itl_p99_ms"),
    "W3": ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "output_tok_s"),
    "W4": ("output_tok_s", "total_tok_s", "ttft_p50_ms", "itl_p99_ms"),
    "prefill": ("prefill_tok_s", "ttft_p50_ms"),
    START: ("launch_to_ready_s", "launch_to_first_token_s", "peak_engine_mb", "peak_all_mb"),
}


def summarise(
    turns: Sequence[Turn], own: Sequence[str], all_names: Sequence[str]
) -> dict[str, Any]:
    """Medians by system and workload, ratios of each of our own to each other system, failures."""
    by_system = {name: [turn for turn in turns if turn.system == name] for name in all_names}
    workloads = list(dict.fromkeys(name for turn in turns for name in turn.figures))
    return {
        "medians": {
            system: {
                workload: rounded(medians(figures)) | {"num_turns": len(figures)}
                for workload in workloads
                if (figures := [t.figures[workload] for t in its_turns if workload in t.figures])
            }
            for system, its_turns in by_system.items()
        },
        "ratios": {
            f"{ours} / {other}": {
                workload: rounded(found)
                for workload in workloads
                if (found := ratios(*(_by_turn(by_system[n], workload) for n in (ours, other))))
            }
            for ours in own
            for other in all_names
            if other != ours
        },
        "failed": _told(turns, "failed"),
        "not_measured": _told(turns, "not_measured"),
    }


def table(summary: dict[str, Any]) -> str:
    """Medians by workload with a row for each system, then the ratios, then what failed."""
    lines: list[str] = []
    workloads = {name for found in summary["medians"].values() for name in found}
    for workload in sorted(workloads, key=lambda name: (name == START, name)):
        columns = _SHOWN.get(workload.partition("@")[0], _SHOWN["W1"])
        lines += ["", _row(workload, columns)]
        for system, found in summary["medians"].items():
            if workload in found:
                lines.append(_row(f"  {system}", [_cell(found[workload], c) for c in columns]))
        for pair, found in summary["ratios"].items():
            if workload in found:
                cells = [_cell(found[workload], c, "x") for c in columns]
                lines.append(_row(f"  {pair}", cells))
    for kind in ("failed", "not_measured"):
        for one in summary[kind]:
            lines.append(
                f"{kind.replace('_', ' ')}: {one['system']}, turn {one['turn'] + 1}, "
                f"{one['workload']}: {one['reason']}"
            )
    lines.append("x: how many times better, the median of each turn's own ratio; above 1 is ours")
    return "\n".join(lines)


def as_document(turn: Turn) -> dict[str, Any]:
    """One turn, raw."""
    return {
        "system": turn.system,
        "turn": turn.number,
        "figures": {name: rounded(figures) for name, figures in turn.figures.items()},
        "facts": turn.facts,
    }


def _by_turn(turns: Sequence[Turn], workload: str) -> list[Figures | None]:
    return [turn.figures.get(workload) for turn in turns]


def _told(turns: Sequence[Turn], kind: str) -> list[dict[str, Any]]:
    return [
        {"system": turn.system, "turn": turn.number, "workload": workload, "reason": reason}
        for turn in turns
        for workload, reason in getattr(turn, kind).items()
    ]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{name:<34}" + "".join(f"{cell:>24}" for cell in cells)


def _cell(figures: Figures, name: str, mark: str = "") -> str:
    return f"{figures[name]:,.2f}{mark}" if name in figures else "-"
