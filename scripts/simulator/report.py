"""A simulation's document: a table for people, JSON for programs (the same bytes each time)."""

import json
from typing import Any

_FIGURES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "longest_gap_s": "longest gap of a request",
    "end_to_end_s": "end to end",
}
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def as_json(document: dict[str, Any]) -> str:
    """Keys in their own order, one line feed at the end."""
    return json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def as_table(document: dict[str, Any]) -> str:
    requests, engines = document["requests"], document["engines"]
    throughput, hits = requests["throughput"], engines["cache_hit_rate"]
    preemptions, blocks = engines["preemptions"], engines["blocks"]
    lines = [
        f"{requests['num_finished']} of {document['trace']['num_requests']} requests finished in "
        f"{requests['duration_s']:.3f} s of virtual time ({document['trace']['name']})",
        f"{_number(throughput['requests_per_s'])} requests/s, "
        f"{_number(throughput['prompt_tokens_per_s'])} prompt tok/s, "
        f"{_number(throughput['output_tokens_per_s'])} output tok/s",
        f"{'milliseconds':<26}" + "".join(f"{column:>12}" for column in _COLUMNS),
    ]
    for name, title in _FIGURES.items():
        figures = requests[name]
        cells = ["-" if figures is None else f"{figures[key] * 1000:.2f}" for key in _COLUMNS]
        lines.append(f"{title:<26}" + "".join(f"{cell:>12}" for cell in cells))
    goodput = requests["goodput"]
    if goodput is not None:
        lines.append(
            f"promises kept: {goodput['num_kept']} requests ({_percent(goodput['share_kept'])}), "
            f"{_number(goodput['requests_per_s'])} requests/s"
        )
    lines += [
        f"{engines['num_engines']} engines, {engines['num_steps']} steps, mean batch "
        f"{_number(engines['mean_batch'])}, {_number(engines['mean_tokens_a_step'])} tokens a "
        f"step, busy {_percent(engines['utilisation'])}",
        f"cache hits {_percent(hits['all'])} (device {_percent(hits['device'])}, host "
        f"{_percent(hits['host'])}); blocks used {_percent(blocks['mean_share_used'])} on average, "
        f"{_percent(blocks['peak_share_used'])} at most, of {blocks['total_an_engine']}",
        f"preemptions: {preemptions['recompute']} by recompute ({preemptions['forced']} forced), "
        f"{preemptions['swap']} by swap",
    ]
    lines += [f"refused, {reason}: {count}" for reason, count in requests["refused"].items()]
    if document["trace"]["num_rows_skipped"]:
        lines.append(f"rows of the trace skipped: {document['trace']['num_rows_skipped']}")
    if document["trace"]["num_turns_dropped"]:
        lines.append(f"turns never sent: {document['trace']['num_turns_dropped']}")
    return "\n".join(lines)


def as_plan_table(document: dict[str, Any]) -> str:
    """Of the planner's sweep."""
    lines = [
        f"{'token budget':>12}{'replicas':>10}{'p99 TTFT ms':>14}{'p99 TPOT ms':>14}"
        f"{'busy':>8}   holds"
    ]
    for row in document["tried"]:
        ttft, tpot = (
            "-" if row[key] is None else f"{row[key] * 1000:.2f}"
            for key in ("ttft_p99_s", "tpot_p99_s")
        )
        lines.append(
            f"{row['max_num_batched_tokens']:>12}{row['replicas']:>10}{ttft:>14}{tpot:>14}"
            f"{_percent(row['utilisation']):>8}   {'yes' if row['holds'] else row['why_not']}"
        )
    best = document["best"]
    lines.append(
        "nothing tried holds the promises; raise --max-replicas or the limits"
        if best is None
        else f"fewest: {best['replicas']} replicas with a budget of "
        f"{best['max_num_batched_tokens']} tokens"
    )
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
