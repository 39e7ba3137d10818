"""What a client saw of each request, and the summary of many. Times are seconds since the start
of the measurement.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass
class RequestRecord:
    """One request as its client saw it.

    due      the scheduled arrival (open loop), or the moment of sending (closed loop)
    sent     later than due only if the client itself was late

        due ... sent ......... first_token ... last_token ... finished
        |<------- TTFT ------------>|
        |<------------------ end-to-end ------------------------>|
    """

    index: int
    due_s: float
    sent_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    """Between one output and the next; an output may hold several tokens."""
    error: str | None = None
    """The kind of failure; None for a request that finished."""
    detail: str = ""
    """Of the failure."""


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Count, mean, percentiles (linear between neighbours) and max; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    cuts = ordered * 99  # of one value; Python before 3.13 does not take one
    if len(ordered) > 1:
        cuts = statistics.quantiles(ordered, n=100, method="inclusive")
    return {
        "count": len(ordered),
        "mean": statistics.fmean(ordered),
        **{f"p{percent}": cuts[percent - 1] for percent in PERCENTILES},
        "max": ordered[-1],
    }


def throughput(
    num_requests: int, num_prompt_tokens: int, num_output_tokens: int, duration_s: float
) -> dict[str, float]:
    """Finished requests and their tokens a second; 0 of a run that took no time."""
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    return {
        "requests_per_s": num_requests * per_s,
        "prompt_tokens_per_s": num_prompt_tokens * per_s,
        "output_tokens_per_s": num_output_tokens * per_s,
    }


def summarise(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Latencies in seconds of the requests that finished, throughput, and failures by kind.

    The duration is from the first due time to the last end, of whichever requests.
    """
    done = [record for record in records if record.error is None]
    ends = [record.finished_s for record in records if record.finished_s is not None]
    start_s = min((record.due_s for record in records), default=0.0)
    duration_s = max(ends, default=start_s) - start_s
    num_prompt_tokens = sum(record.num_prompt_tokens for record in done)
    num_output_tokens = sum(record.num_output_tokens for record in done)
    return {
        "num_requests": len(records),
        "num_finished": len(done),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "duration_s": duration_s,
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(record.num_cached_tokens for record in done),
        "num_output_tokens": num_output_tokens,
        "throughput": throughput(len(done), num_prompt_tokens, num_output_tokens, duration_s),
        "ttft_s": distribution(
            r.first_token_s - r.due_s for r in done if r.first_token_s is not None
        ),
        "tpot_s": distribution(tpot for r in done if (tpot := _tpot_s(r)) is not None),
        "inter_token_s": distribution(gap for r in done for gap in r.gaps_s),
        "end_to_end_s": distribution(
            r.finished_s - r.due_s for r in done if r.finished_s is not None
        ),
        "client_lateness_s": distribution(r.sent_s - r.due_s for r in records),
    }


def _tpot_s(record: RequestRecord) -> float | None:
    """Mean time of an output token after the first; None if there is no second one."""
    if record.num_output_tokens < 2 or record.first_token_s is None or record.last_token_s is None:
        return None
    return (record.last_token_s - record.first_token_s) / (record.num_output_tokens - 1)
