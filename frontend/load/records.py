"""What a client saw of each request, and the summary of many. Times are seconds since the start
of the measurement.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

PERCENTILES = (50.0, 90.0, 95.0, 99.0)
SLOS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "end_to_end_s"}
"""Names as vLLM's --goodput has them, and the latency that each limits."""


@dataclass
class RequestRecord:
    """One request as its client saw it.

    due      the scheduled arrival (open loop), or the moment of sending (closed loop)
    sent     later than due only if the client was late, or held back by a limit of requests at once

        due ... sent ......... first_token ... last_token ... finished
        |<------- TTFT ------------>|
        |       |<- TTFT from send >|
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
    """A sentence about the failure."""

    def latencies(self) -> dict[str, float]:
        """Seconds, of those that it has. TPOT: mean time of an output token after the first."""
        found = {"client_lateness_s": self.sent_s - self.due_s}
        if self.first_token_s is not None:
            found["ttft_s"] = self.first_token_s - self.due_s
            found["ttft_from_send_s"] = self.first_token_s - self.sent_s
            if self.num_output_tokens > 1 and self.last_token_s is not None:
                decode_s = self.last_token_s - self.first_token_s
                found["tpot_s"] = decode_s / (self.num_output_tokens - 1)
        if self.finished_s is not None:
            found["end_to_end_s"] = self.finished_s - self.due_s
            found["end_to_end_from_send_s"] = self.finished_s - self.sent_s
        return found

    def output_times_s(self) -> list[float]:
        """When each output came."""
        if self.first_token_s is None:
            return []
        return list(itertools.accumulate(self.gaps_s, initial=self.first_token_s))

    def is_good(self, slos_s: Mapping[str, float]) -> bool:
        """Whether it finished within its SLOs. As with vLLM the TPOT of a single token is 0."""
        latencies = {"tpot_s": 0.0, **self.latencies()}
        return self.error is None and all(
            latencies.get(SLOS[name], math.inf) <= limit_s for name, limit_s in slos_s.items()
        )


def percentile(ordered: Any, percent: float) -> float:
    """A percentile of rising values in a sequence or array, linear between neighbours."""
    place = (len(ordered) - 1) * percent / 100
    low = ordered[int(place)]
    return float(low + (ordered[math.ceil(place)] - low) * (place - int(place)))


def distribution(
    values: Iterable[float], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float] | None:
    """Count, mean, standard deviation, percentiles and max; None if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    mean = statistics.fmean(ordered)
    return {
        "count": len(ordered),
        "mean": mean,
        "std": math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)),
        **{f"p{percent:g}": percentile(ordered, percent) for percent in percentiles},
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


def summarise(
    records: Sequence[RequestRecord],
    *,
    percentiles: Sequence[float] = PERCENTILES,
    slos_s: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Latencies in seconds of the requests that finished, throughput, and failures by kind.

    The duration is from the first due time to the last end, of whichever requests. Goodput is of
    requests within all of `slos_s`, by the names of SLOS; a request that failed is not.
    """
    done = [record for record in records if record.error is None]
    latencies = [record.latencies() for record in done]
    start_s, stop_s = span_s(records)
    num_prompt_tokens = sum(record.num_prompt_tokens for record in done)
    num_output_tokens = sum(record.num_output_tokens for record in done)

    def of(name: str) -> dict[str, float] | None:
        return distribution((one[name] for one in latencies if name in one), percentiles)

    return {
        "num_requests": len(records),
        "num_finished": len(done),
        "errors": dict(Counter(record.error for record in records if record.error is not None)),
        "error_examples": {one.error: one.detail for one in reversed(records) if one.error},
        "duration_s": stop_s - start_s,
        "num_prompt_tokens": num_prompt_tokens,
        "num_cached_tokens": sum(record.num_cached_tokens for record in done),
        "num_output_tokens": num_output_tokens,
        "throughput": throughput(len(done), num_prompt_tokens, num_output_tokens, stop_s - start_s),
        "peak_output_tokens_per_s": max(tokens_by_time(records, start_s), default=0.0),
        "peak_concurrent_requests": max(
            (count for _, count in running_by_time(records)), default=0
        ),
        "goodput": _goodput(records, slos_s, stop_s - start_s) if slos_s else None,
        "ttft_s": of("ttft_s"),
        "ttft_from_send_s": of("ttft_from_send_s"),
        "tpot_s": of("tpot_s"),
        "inter_token_s": distribution((gap for r in done for gap in r.gaps_s), percentiles),
        "end_to_end_s": of("end_to_end_s"),
        "end_to_end_from_send_s": of("end_to_end_from_send_s"),
        "client_lateness_s": distribution((r.sent_s - r.due_s for r in records), percentiles),
    }


def _goodput(
    records: Sequence[RequestRecord], slos_s: Mapping[str, float], duration_s: float
) -> dict[str, Any]:
    num_good = sum(record.is_good(slos_s) for record in records)
    return {
        "slos_s": dict(slos_s),
        "requests_per_s": num_good / duration_s if duration_s > 0 else 0.0,
        "share": num_good / len(records) if records else 0.0,
    }


def span_s(records: Sequence[RequestRecord]) -> tuple[float, float]:
    """The first due time, and the last end."""
    ends = [one.finished_s for one in records if one.finished_s is not None]
    start_s = min((one.due_s for one in records), default=0.0)
    return start_s, max(ends, default=start_s)


def tokens_by_time(
    records: Iterable[RequestRecord], start_s: float, width_s: float = 1.0
) -> list[float]:
    """Output tokens in each interval of this width. A request's tokens are spread evenly over its
    outputs."""
    counts: defaultdict[int, float] = defaultdict(float)
    for record in records:
        times_s = record.output_times_s()
        for time_s in times_s:
            counts[int((time_s - start_s) / width_s)] += record.num_output_tokens / len(times_s)
    return [counts[at] for at in range(max(counts, default=-1) + 1)]


def running_by_time(records: Iterable[RequestRecord]) -> list[tuple[float, int]]:
    """(time, requests sent and not ended from then on); of changes at one time an end is first."""
    changes = sorted(
        change
        for one in records
        if one.finished_s is not None and one.finished_s > one.sent_s
        for change in ((one.sent_s, 1), (one.finished_s, -1))
    )
    running = itertools.accumulate(step for _, step in changes)
    return [(time_s, count) for (time_s, _), count in zip(changes, running, strict=True)]
