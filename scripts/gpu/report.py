"""A suite's document as a short table, and the list of what there is.

Owns the layout. Must not know torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripts.gpu.frame import Group


def as_list(groups: Iterable[Group]) -> str:
    """Every check, timing and figure by name."""
    lines = []
    for group in groups:
        lines.append(group.name)
        if group.missing is not None:
            lines.append(f"  not there: {group.missing}")
        if group.broken is not None:
            lines.append(f"  broken: {group.broken}")
        lines += [f"  check   {check.name} (<= {check.tolerance:g})" for check in group.checks]
        lines += [f"  timing  {timing.name} (after: {timing.check})" for timing in group.timings]
        lines += [f"  figure  {figure.name} (after: {figure.check})" for figure in group.figures]
    return "\n".join(lines)


def as_table(document: dict[str, Any]) -> str:
    """What passed as a count, what did not by name, then timings and figures."""
    rows = document["rows"]
    lines = []
    ceilings = document.get("ceilings")
    if ceilings is None:
        lines.append(f"no ceilings: {document.get('why_no_ceilings')}")
    else:
        lines.append(
            f"{document['device']['name']}: copy {ceilings['copy_bytes_s'] / 1e12:.2f} TB/s, "
            f"bf16 product {ceilings['matmul_flop_s'] / 1e12:.0f} TFLOP/s"
        )
    checks = [row for row in rows if row["kind"] == "check"]
    passed = [row for row in checks if row["state"] == "passed"]
    lines.append(f"{len(passed)} of {len(checks)} checks passed")
    for row in rows:
        if row["state"] not in ("passed", "timed", "measured"):
            why = row.get("why") or f"error {row['error']:.3g} > {row['tolerance']:g}"
            lines.append(f"  {row['state']}: {row['group']} / {row['name']}: {why}")
    timed = [row for row in rows if row["state"] == "timed"]
    if timed:
        width = max(len(row["name"]) for row in timed)
        heads = ("us", "again", "graph", "floor", "of it", "GB/s", "TFLOP/s")
        lines.append(" " * width + "".join(f"{head:>10}" for head in heads))
        lines += [_timing_line(row, width) for row in timed]
    for row in rows:
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
