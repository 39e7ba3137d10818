"""The document of a run as a short table."""

from __future__ import annotations

from collections import Counter
from typing import Any

FINE = ("passed", "timed", "measured")


def as_table(document: dict[str, Any]) -> str:
    """What passed as a count, what did not by name, then timings and figures."""
    checks, timings = document["checks"], document["timings"]
    if document["ceilings"] is None:
        lines = [f"no ceilings: {document['why_no_ceilings']}"]
    else:
        copy, product = document["ceilings"].values()
        lines = [
            f"{document['device']['name']}: copy {copy / 1e12:.2f} TB/s, "
            f"bf16 product {product / 1e12:.0f} TFLOP/s"
        ]
    states = Counter(row["state"] for row in checks)
    lines.append("checks: " + ", ".join(f"{number} {state}" for state, number in states.items()))
    wrong = [row for row in checks + timings if row["state"] not in (*FINE, "skipped")]
    lines += [f"  {row['state']}: {row['name']}: {row.get('why', '')}" for row in wrong]
    timed = [row for row in timings if row["state"] == "timed"]
    width = max((len(row["name"]) for row in timed), default=0)
    if timed:
        heads = ("us", "again", "graph", "floor", "of it", "GB/s", "TFLOP/s")
        lines.append(" " * width + "".join(f"{head:>10}" for head in heads))
    lines += [_timing_line(row, width) for row in timed]
    for row in timings:
        if row["state"] == "measured":
            numbers = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
            lines.append(f"{row['name']}: {numbers}")
    return "\n".join(lines)


def _timing_line(row: dict[str, Any], width: int) -> str:
    graph_us = row.get("graph_us")
    cells = (
        f"{row['median_us']:.1f}",
        f"{row.get('again_us', 0):.1f}",
        f"{graph_us:.1f}" if isinstance(graph_us, int | float) else "-",
        f"{row['floor_us']:.1f}",
        f"{100 * row['of_floor']:.0f} %",
        f"{row['gigabytes_s']:.0f}",
        f"{row['teraflop_s']:.0f}" if "teraflop_s" in row else "",
    )
    return f"{row['name']:{width}}" + "".join(f"{cell:>10}" for cell in cells)
