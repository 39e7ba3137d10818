"""From requests' records to figures, their medians over rounds, and ratios of engines.

A figure that was not measured is absent, never zero."""

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence

from frontend.load.records import RequestRecord, summarise
from scripts.comparison.workloads import Workload

Figures = dict[str, float]
LOWER_IS_BETTER = ("ttft_", "itl_", "launch_", "peak_", "duration_")
"""How the names of figures begin of which less is better."""


class Incomplete(Exception):
    """Not every request was served in full: the workload has no figures."""


def figures_of(workload: Workload, records: Sequence[RequestRecord]) -> Figures:
    """Seconds count from the first arrival; an inter-token time is what a client sees between two
    messages with tokens. Raises Incomplete: a request failed, or gave another number of tokens than
    was asked for."""
    faults = list(_faults(workload, records))
    if faults:
        raise Incomplete(f"{len(faults)} of {len(records)} requests: {faults[0]}")
    summary = summarise(records)
    num_prompts = sum(len(request.prompt) for request in workload.requests)
    figures = {
        "duration_s": summary["duration_s"],
        "output_tok_s": summary["throughput"]["output_tokens_per_s"],
        "total_tok_s": (summary["num_output_tokens"] + num_prompts) / summary["duration_s"],
    }
    ttft, tpot = summary["ttft_s"], summary["tpot_s"]
    is_timed = ttft is not None and ttft["count"] == len(records)
    for name, found in (("ttft", ttft if is_timed else None), ("itl", summary["inter_token_s"])):
        if found is not None:
            figures |= {f"{name}_{part}_ms": 1e3 * found[part] for part in ("p50", "p99")}
    if len(records) == 1 and is_timed:
        figures["prefill_tok_s"] = num_prompts / ttft["p50"]
        if tpot is not None:
            figures["decode_tok_s"] = 1 / tpot["p50"]
    return figures


def medians(rounds: Iterable[Figures]) -> Figures:
    """Each figure's median over the rounds that have it."""
    by_name: dict[str, list[float]] = {}
    for figures in rounds:
        for name, value in figures.items():
            by_name.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in by_name.items()}


def ratios(ours: Sequence[Figures | None], theirs: Sequence[Figures | None]) -> Figures:
    """How many times better we are: the median over rounds of each round's own ratio.

    Above 1 is in our favour, whichever way the figure counts. Only rounds in which both were
    measured count; the machine's slow minutes are in both sides of such a ratio."""
    return medians(
        {
            name: theirs_now[name] / value
            if name.startswith(LOWER_IS_BETTER)
            else value / theirs_now[name]
            for name, value in ours_now.items()
            if name in theirs_now and value > 0 and theirs_now[name] > 0
        }
        for ours_now, theirs_now in zip(ours, theirs, strict=True)
        if ours_now is not None and theirs_now is not None
    )


def rounded(figures: Mapping[str, float]) -> Figures:
    """Five significant digits, for people and files."""
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def _faults(workload: Workload, records: Sequence[RequestRecord]) -> Iterator[str]:
    if len(records) != len(workload.requests):
        yield f"{len(records)} records of {len(workload.requests)} requests"
    for request, record in zip(workload.requests, records, strict=False):
        if record.error is not None:
            yield f"{record.error}: {record.detail}"
        elif record.num_output_tokens != request.num_output_tokens:
            yield f"{record.num_output_tokens} tokens came, not {request.num_output_tokens}"
        elif record.finished_s is None:
            yield "it has no end"
