"""From requests' records to figures, their medians over turns, and ratios of engines.

Pure numbers in, numbers out. A figure that was not measured is absent, never zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from scripts.comparison.workloads import Workload
from scripts.load.records import RequestRecord, distribution

Figures = dict[str, float]
LOWER_IS_BETTER = ("ttft_", "itl_", "launch_", "peak_", "duration_")
"""How the names of figures begin of which less is better."""


class Incomplete(Exception):
    """Not every request was served in full: the workload has no figures."""


def figures_of(workload: Workload, records: Sequence[RequestRecord]) -> Figures:
    """Seconds count from the first arrival; an inter-token time is what a client sees between two
    messages with tokens.

    Raises:
        Incomplete: a request failed, or gave another number of tokens than was asked for.
    """
    faults = list(_faults(workload, records))
    if faults:
        raise Incomplete(f"{len(faults)} of {len(records)} requests: {faults[0]}")
    num_outputs = sum(record.num_output_tokens for record in records)
    num_prompts = sum(len(request.prompt_token_ids) for request in workload.requests)
    ends = [record.finished_s for record in records if record.finished_s is not None]
    duration_s = max(ends) - min(record.due_s for record in records)
    figures = {
        "duration_s": duration_s,
        "output_tok_s": num_outputs / duration_s,
        "total_tok_s": (num_outputs + num_prompts) / duration_s,
    }
    firsts = [r.first_token_s - r.due_s for r in records if r.first_token_s is not None]
    if len(firsts) == len(records):
        figures |= _percentiles("ttft", firsts)
    figures |= _percentiles("itl", [gap for record in records for gap in record.gaps_s])
    if len(records) == 1 and firsts:
        [record] = records
        figures["prefill_tok_s"] = num_prompts / firsts[0]
        if record.num_output_tokens > 1 and record.last_token_s and record.first_token_s:
            decode_s = record.last_token_s - record.first_token_s
            figures["decode_tok_s"] = (record.num_output_tokens - 1) / decode_s
    return figures


def medians(turns: Iterable[Figures]) -> Figures:
    """Each figure's median over the turns that have it."""
    by_name: dict[str, list[float]] = {}
    for figures in turns:
        for name, value in figures.items():
            by_name.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in by_name.items()}


def ratios(ours: Sequence[Figures | None], theirs: Sequence[Figures | None]) -> Figures:
    """How many times better we are: the median over turns of each turn's own ratio.

    Above 1 is in our favour, whichever way the figure counts. Only turns in which both were
    measured count; the machine's slow minutes are in both sides of such a ratio.
    """
    return medians(
        {
            name: theirs_now[name] / value if is_lower_better(name) else value / theirs_now[name]
            for name, value in ours_now.items()
            if name in theirs_now and value > 0 and theirs_now[name] > 0
        }
        for ours_now, theirs_now in zip(ours, theirs, strict=True)
        if ours_now is not None and theirs_now is not None
    )


def is_lower_better(name: str) -> bool:
    return name.startswith(LOWER_IS_BETTER)


def rounded(figures: Mapping[str, float]) -> Figures:
    """For people and files: five significant digits."""
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def _faults(workload: Workload, records: Sequence[RequestRecord]) -> Iterable[str]:
    if len(records) != len(workload.requests):
        yield f"{len(records)} records of {len(workload.requests)} requests"
    for request, record in zip(workload.requests, records, strict=False):
        if record.error is not None:
            yield record.error
        elif record.num_output_tokens != request.num_output_tokens:
            yield f"{record.num_output_tokens} tokens came, not {request.num_output_tokens}"
        elif record.finished_s is None:
            yield "it has no end"


def _percentiles(name: str, values_s: Sequence[float]) -> Figures:
    found = distribution(values_s)
    if found is None:
        return {}
    return {f"{name}_{part}_ms": 1e3 * found[part] for part in ("p50", "p99")}
