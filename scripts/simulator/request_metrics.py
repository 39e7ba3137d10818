"""What became of the requests: one entry of a few columns each, and the figures made from them."""

import array
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
_PERCENTILES = (50, 90, 95, 99)


@dataclasses.dataclass(frozen=True, slots=True)
class ServiceTargets:
    """What a request is promised; None for nothing."""

    ttft_s: float | None = None
    tpot_s: float | None = None


class RequestMetrics:
    """Columns that grow by 52 bytes a finished request, and counts of the rest."""

    def __init__(self) -> None:
        self._arrival_s = array.array("d")
        self._ttft_s = array.array("d")
        self._end_to_end_s = array.array("d")
        self._tpot_s = array.array("d")
        self._longest_gap_s = array.array("d")
        self._num_prompt_tokens = array.array("l")
        self._num_output_tokens = array.array("i")
        self.refused: dict[str, int] = {}
        """By reason."""

    @property
    def num_finished(self) -> int:
        return len(self._arrival_s)

    def finished(
        self,
        *,
        arrival_s: float,
        first_token_s: float,
        finished_s: float,
        longest_gap_s: float,
        num_prompt_tokens: int,
        num_output_tokens: int,
    ) -> None:
        self._arrival_s.append(arrival_s)
        self._ttft_s.append(first_token_s - arrival_s)
        self._end_to_end_s.append(finished_s - arrival_s)
        num_gaps = num_output_tokens - 1
        # an answer of one token has no time per token after the first
        self._tpot_s.append((finished_s - first_token_s) / num_gaps if num_gaps else np.nan)
        self._longest_gap_s.append(longest_gap_s if num_gaps else np.nan)
        self._num_prompt_tokens.append(num_prompt_tokens)
        self._num_output_tokens.append(num_output_tokens)

    def reorder(self, order: npt.NDArray[np.int64]) -> None:
        """Entry i becomes what entry order[i] was: sums are rounded in their order."""
        for name, column in vars(self).items():
            if isinstance(column, array.array):
                values = np.frombuffer(column, column.typecode)[order]
                setattr(self, name, array.array(column.typecode, values.tobytes()))

    def was_refused(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def percentile_s(self, figure: str, percentile: float) -> float | None:
        """Of ttft, tpot, longest_gap or end_to_end; None where there is nothing to measure."""
        values = self._column(figure)
        return float(np.percentile(values, percentile)) if len(values) else None

    def latencies(self, figure: str) -> Float64Array:
        """All of them, sorted."""
        return np.sort(self._column(figure))

    def figures(self, *names: str) -> list[Float64Array]:
        """Columns of ttft, tpot, longest_gap or end_to_end, an entry a finished request; NaN where
        a request has no such figure."""
        return [np.frombuffer(getattr(self, f"_{name}_s")).copy() for name in names]

    def summary(self, duration_s: float, targets: ServiceTargets) -> dict[str, Any]:
        num_prompt = int(np.frombuffer(self._num_prompt_tokens, np.int64).sum())
        num_output = int(np.frombuffer(self._num_output_tokens, np.int32).sum())
        seconds = duration_s or float("nan")
        return {
            "num_finished": self.num_finished,
            "num_refused": sum(self.refused.values()),
            "refused": dict(sorted(self.refused.items())),
            "duration_s": duration_s,
            "num_prompt_tokens": num_prompt,
            "num_output_tokens": num_output,
            "throughput": {
                "requests_per_s": _finite(self.num_finished / seconds),
                "prompt_tokens_per_s": _finite(num_prompt / seconds),
                "output_tokens_per_s": _finite(num_output / seconds),
            },
            **{
                f"{figure}_s": self._figures(figure)
                for figure in ("ttft", "tpot", "longest_gap", "end_to_end")
            },
            "goodput": self._goodput(seconds, targets),
        }

    def _goodput(self, seconds: float, targets: ServiceTargets) -> dict[str, Any] | None:
        """Requests that kept every promise; refused ones broke theirs. An answer of one token keeps
        any promise about the time per token."""
        if targets.ttft_s is None and targets.tpot_s is None:
            return None
        kept = np.ones(self.num_finished, bool)
        if targets.ttft_s is not None:
            kept &= np.frombuffer(self._ttft_s) <= targets.ttft_s
        if targets.tpot_s is not None:
            kept &= ~(np.frombuffer(self._tpot_s) > targets.tpot_s)
        total = self.num_finished + sum(self.refused.values())
        num_kept = int(kept.sum())
        return {
            "slo_ttft_s": targets.ttft_s,
            "slo_tpot_s": targets.tpot_s,
            "num_kept": num_kept,
            "share_kept": num_kept / total if total else None,
            "requests_per_s": _finite(num_kept / seconds),
        }

    def _figures(self, figure: str) -> dict[str, float] | None:
        values = self._column(figure)
        if not len(values):
            return None
        percentiles = np.percentile(values, _PERCENTILES)
        return {
            "mean": float(values.mean()),
            **{
                f"p{percentile}": float(value)
                for percentile, value in zip(_PERCENTILES, percentiles, strict=True)
            },
            "max": float(values.max()),
        }

    def _column(self, figure: str) -> Float64Array:
        column: array.array[float] = getattr(self, f"_{figure}_s")
        values = np.frombuffer(column)
        return values[~np.isnan(values)]


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
