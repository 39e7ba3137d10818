"""Two results compared, with confidence intervals by bootstrap."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from frontend.load.records import RequestRecord, percentile, span_s, tokens_by_time

_Draws = npt.NDArray[np.float64]
_NUM_RESAMPLES = 1000
_NUM_INTERVALS = 50
# of rising values
_STATISTICS: dict[str, Callable[[_Draws], float]] = {
    "mean": lambda ordered: float(ordered.mean()),
    "p50": lambda ordered: percentile(ordered, 50),
    "p99": lambda ordered: percentile(ordered, 99),
}
LATENCIES = {
    "TTFT": "ttft_s",
    "TTFT from send": "ttft_from_send_s",
    "TPOT": "tpot_s",
    "E2EL": "end_to_end_s",
}


def compare(
    first: Sequence[RequestRecord],
    second: Sequence[RequestRecord],
    *,
    slos_s: Mapping[str, float] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row for each figure: both values, the ratio second / first with its interval, and whether
    the second is better, worse, or neither is clear. Requests near each other in time are alike
    (they share a queue), so circular blocks of n ** (1/3) neighbours are drawn again, gaps between
    tokens with their requests. An interval covers chance within the two runs, not what differs
    from day to day."""
    rows = []
    sides = [
        _figures(side, slos_s, np.random.default_rng([seed, at]))
        for at, side in enumerate((first, second))
    ]
    for name, (value, draws) in sides[0].items():
        if name not in sides[1]:
            continue
        other, other_draws = sides[1][name]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = other_draws / draws
        ratios = ratios[np.isfinite(ratios)]
        if not value or not len(ratios):
            continue
        tail = 50 * (1 - confidence)
        low, high = (float(bound) for bound in np.percentile(ratios, [tail, 100 - tail]))
        more_is_better = not name.endswith("ms")
        verdict = "no clear difference"
        if low > 1 or high < 1:
            verdict = "better" if (low > 1) == more_is_better else "worse"
        row = {"figure": name, "first": value, "second": other, "ratio": other / value}
        rows.append(row | {"low": low, "high": high, "verdict": verdict})
    return rows


def _figures(
    records: Sequence[RequestRecord],
    slos_s: Mapping[str, float] | None,
    random: np.random.Generator,
) -> dict[str, tuple[float, _Draws]]:
    """Each figure's value and its resamples."""
    records = sorted(records, key=lambda record: record.due_s)
    done = [record for record in records if record.error is None]
    latencies = [record.latencies() for record in done]
    found: dict[str, tuple[float, _Draws]] = {}
    for title, name in LATENCIES.items():
        values = np.array([one[name] for one in latencies if name in one])
        draws = [np.sort(values[drawn]) for drawn in resamples(len(values), random)]
        found |= _statistics(title, np.sort(values), draws)
    gaps = np.array([gap for record in done for gap in record.gaps_s])
    owners = np.repeat(np.arange(len(done)), [len(record.gaps_s) for record in done])
    order = np.argsort(gaps)
    gaps, owners = gaps[order], owners[order]
    counts = (np.bincount(drawn, minlength=len(done)) for drawn in resamples(len(done), random))
    found |= _statistics("ITL", gaps, [np.repeat(gaps, count[owners]) for count in counts])
    start_s, stop_s = span_s(records)
    if stop_s > start_s:
        width_s = (stop_s - start_s) / _NUM_INTERVALS
        by_time = tokens_by_time(done, start_s, width_s)
        by_time += [0.0] * (_NUM_INTERVALS + 1 - len(by_time))
        by_time[_NUM_INTERVALS - 1] += by_time.pop()  # what came at the very end
        found["output tok/s"] = _mean(np.array(by_time) / width_s, random)
    if slos_s and records:
        good = np.array([record.is_good(slos_s) for record in records], np.float64)
        found["share within SLOs"] = _mean(good, random)
    return found


def _statistics(
    title: str, ordered: _Draws, draws: Sequence[_Draws]
) -> dict[str, tuple[float, _Draws]]:
    """Statistics in milliseconds; none without values."""
    return {
        f"{title} {part}, ms": (
            1000 * statistic(ordered),
            np.array([1000 * statistic(one) for one in draws if len(one)]),
        )
        for part, statistic in _STATISTICS.items()
        if len(ordered)
    }


def _mean(values: npt.NDArray[np.float64], random: np.random.Generator) -> tuple[float, _Draws]:
    draws = [values[drawn].mean() for drawn in resamples(len(values), random)]
    return float(values.mean()), np.array(draws)


def resamples(
    count: int, random: np.random.Generator, block: int | None = None
) -> list[npt.NDArray[np.int64]]:
    """Indices of each resample: circular blocks of neighbours, `count` indices in all."""
    if not count:
        return []
    block = block or round(count ** (1 / 3))
    starts = random.integers(count, size=(_NUM_RESAMPLES, -(-count // block)))
    indices = (starts[:, :, None] + np.arange(block)) % count
    return list(indices.reshape(_NUM_RESAMPLES, -1)[:, :count])
