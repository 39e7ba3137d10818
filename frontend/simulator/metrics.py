"""What became of the requests: columns with an entry a request, and the report of a run."""

import array
import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from frontend.load.records import distribution, throughput
from frontend.load.report import latency_lines
from frontend.load.traces.trace import TraceRequest

_BUSY = (
    "busy: share of the time in which a step runs, full or not; a request joins the next step, it "
    "does not wait for an idle engine"
)

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "longest_gap": "longest gap of a request",
    "end_to_end": "end to end",
}


@dataclasses.dataclass(frozen=True, slots=True)
class SLO:
    """Limits of a request's latencies; None for no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class RequestMetrics:
    """36 bytes a finished request, and counts of the refused ones."""

    def __init__(self) -> None:
        self._latencies_s = {name: array.array("d") for name in LATENCIES}
        """NaN where a request has no such figure."""
        self._num_output_tokens = array.array("i")
        self._num_prompt_tokens = 0
        self.refused: Counter[str] = Counter()
        """Counts of refused requests by reason."""

    @property
    def num_finished(self) -> int:
        return len(self._num_output_tokens)

    def finish(
        self,
        request: TraceRequest,
        num_output_tokens: int,
        first_token_s: float,
        finished_s: float,
        longest_gap_s: float,
    ) -> None:
        columns, num_gaps = self._latencies_s, num_output_tokens - 1
        columns["ttft"].append(first_token_s - request.arrival_s)
        columns["end_to_end"].append(finished_s - request.arrival_s)
        # an answer of one token has no time per token after the first
        columns["tpot"].append((finished_s - first_token_s) / num_gaps if num_gaps else np.nan)
        columns["longest_gap"].append(longest_gap_s if num_gaps else np.nan)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_output_tokens.append(num_output_tokens)

    def refuse(self, reason: str) -> None:
        self.refused[reason] += 1

    def latencies(self, name: str) -> npt.NDArray[np.float64]:
        """Of ttft, tpot, longest_gap or end_to_end: all of them, sorted."""
        values = np.frombuffer(self._latencies_s[name])
        return np.sort(values[~np.isnan(values)])

    @property
    def num_output_tokens(self) -> int:
        return sum(self._num_output_tokens)

    def summary(self, duration_s: float, slo: SLO) -> dict[str, Any]:
        tokens = (self._num_prompt_tokens, self.num_output_tokens)
        return {
            "num_finished": self.num_finished,
            "num_refused": self.refused.total(),
            "refused": dict(sorted(self.refused.items())),
            "duration_s": duration_s,
            "num_prompt_tokens": tokens[0],
            "num_output_tokens": tokens[1],
            "throughput": throughput(self.num_finished, *tokens, duration_s),
            **{f"{name}_s": distribution(self.latencies(name).tolist()) for name in LATENCIES},
            "goodput": self._goodput(duration_s, slo),
        }

    def _goodput(self, duration_s: float, slo: SLO) -> dict[str, Any] | None:
        """Requests within the SLO; refused ones are not. An answer of one token has no TPOT."""
        if slo.ttft_s is None and slo.tpot_s is None:
            return None
        attained = np.ones(self.num_finished, bool)
        for name, limit_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
            if limit_s is not None:
                attained &= ~(np.frombuffer(self._latencies_s[name]) > limit_s)
        total = self.num_finished + self.refused.total()
        num_attained = int(attained.sum())
        return {
            "slo_ttft_s": slo.ttft_s,
            "slo_tpot_s": slo.tpot_s,
            "num_attained": num_attained,
            "slo_attainment": num_attained / total if total else None,
            "requests_per_s": num_attained / duration_s if duration_s else 0.0,
        }


# ---------------------------------------------------------------------- report


def as_table(document: dict[str, Any]) -> str:
    """A simulation, for a terminal."""
    trace, requests, engines = (document[key] for key in ("trace", "requests", "engines"))
    rates, hits, goodput = requests["throughput"], engines["cache_hit_rate"], requests["goodput"]
    preemptions, blocks = engines["preemptions"], engines["blocks"]
    lines = [
        f"{requests['num_finished']} of {trace['num_requests']} requests finished in "
        f"{requests['duration_s']:.3f} s of virtual time ({trace['name']})",
        f"{rates['requests_per_s']:.2f} requests/s, {rates['prompt_tokens_per_s']:.2f} prompt "
        f"tok/s, {rates['output_tokens_per_s']:.2f} output tok/s",
        *latency_lines({title: requests[f"{name}_s"] for name, title in LATENCIES.items()}),
    ]
    if goodput is not None:
        lines.append(
            f"SLO attainment {_percent(goodput['slo_attainment'])}: {goodput['num_attained']} "
            f"requests, {goodput['requests_per_s']:.2f} requests/s"
        )
    lines += [
        f"{engines['num_engines']} engines, {engines['num_steps']} steps, mean batch "
        f"{engines['mean_batch'] or 0:.2f}, {engines['mean_tokens_a_step'] or 0:.2f} tokens a "
        f"step, busy {_percent(engines['utilisation'])}",
        f"cache hits {_percent(hits['all'])} (device {_percent(hits['device'])}, host "
        f"{_percent(hits['host'])}); blocks used {_percent(blocks['mean_share_used'])} on average, "
        f"{_percent(blocks['peak_share_used'])} at most, of {blocks['total_an_engine']}",
        f"preemptions: {preemptions['recompute']} by recompute ({preemptions['forced']} forced), "
        f"{preemptions['swap']} by swap",
    ]
    lines.append(_BUSY)
    lines += [f"refused, {reason}: {count}" for reason, count in requests["refused"].items()]
    if trace["num_rows_skipped"]:
        lines.append(f"rows of the trace skipped: {trace['num_rows_skipped']}")
    if trace["num_turns_dropped"]:
        lines.append(f"turns never sent: {trace['num_turns_dropped']}")
    return "\n".join(lines)


def as_plan_table(document: dict[str, Any]) -> str:
    """The planner's trials, for a terminal."""
    lines = [
        f"{'token budget':>12}{'replicas':>10}{'p99 TTFT ms':>14}{'p99 TPOT ms':>14}"
        f"{'tokens a step':>15}{'busy':>9}   within the SLO"
    ]
    for trial in document["tried"]:
        ttft, tpot = (
            "-" if trial[key] is None else f"{trial[key] * 1000:.2f}"
            for key in ("ttft_p99_s", "tpot_p99_s")
        )
        lines.append(
            f"{trial['max_num_batched_tokens']:>12}{trial['replicas']:>10}{ttft:>14}{tpot:>14}"
            f"{trial['mean_tokens_a_step'] or 0:>15.1f}{_percent(trial['utilisation']):>9}   "
            f"{trial['why_not'] or 'yes'}"
        )
    lines.append(_BUSY)
    best = document["best"]
    lines.append(
        "nothing tried is within the SLO; raise --max-replicas or the limits"
        if best is None
        else f"fewest: {best['replicas']} replicas with a budget of "
        f"{best['max_num_batched_tokens']} tokens"
    )
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
