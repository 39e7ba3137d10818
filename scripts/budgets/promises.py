"""Promises to requests, and which of them a run broke.

Owns the counting. Must not know how requests were served.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from scripts.load.records import percentile


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """One request as its client saw it; seconds."""

    ttft_s: float
    tpot_s: float
    """NaN for an answer of one token."""
    num_output_tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class Promise:
    ttft_s: float
    tpot_s: float

    def row(self, setting: str, served: Sequence[Served], duration_s: float) -> dict[str, Any]:
        """What was broken under one setting."""
        late = [one.ttft_s > self.ttft_s for one in served]
        slow = [one.tpot_s > self.tpot_s for one in served]
        return {
            "budget": setting,
            "num_requests": len(served),
            "ttft_broken": sum(late),
            "tpot_broken": sum(slow),
            "requests_broken": sum(map(max, late, slow)),
            "output_tokens_per_s": round(
                sum(one.num_output_tokens for one in served) / duration_s, 1
            ),
            "ttft_p99_ms": round(1e3 * _percentile([one.ttft_s for one in served], 99), 1),
            "tpot_p99_ms": round(1e3 * _percentile([one.tpot_s for one in served], 99), 1),
        }


def _percentile(values: Sequence[float], percent: float) -> float:
    return percentile(sorted(value for value in values if not math.isnan(value)), percent)


def table(name: str, rows: list[dict[str, Any]]) -> str:
    """A trace's rows, one a setting, as text."""
    keys = [key for key, value in rows[0].items() if not isinstance(value, list)]
    lines = [f"{name}: {rows[0]['num_requests']} requests", "  ".join(f"{key:>19}" for key in keys)]
    lines += ["  ".join(f"{row[key]!s:>19}" for key in keys) for row in rows]
    return "\n".join(lines) + "\n"
