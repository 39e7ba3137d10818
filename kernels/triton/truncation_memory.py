"""Memory that the search for thresholds keeps on the device, and where its result lies.

Owns the layout only; must not know how a threshold is found.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_PIVOTS = 16
"""Values at which a round of the search measures a row."""

LIST_SIZE = 4096
"""Candidates that the last bisection reads from a list; more, and it reads the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Memory of `find_thresholds` for a bucket of rows, and its result. Reused from step to step.

    Attributes:
        threshold_R: float32, of the logits divided by their temperature.
        last_tie_R: int32. Kept are x > threshold, and x == threshold with an id up to this.
        The others are private to `find_thresholds`.
    """

    threshold_R: torch.Tensor
    last_tie_R: torch.Tensor
    pivots_R2P: torch.Tensor
    sums_RN: torch.Tensor
    high_R: torch.Tensor
    above_R: torch.Tensor
    target_R: torch.Tensor
    bounds_R2: torch.Tensor
    bound_above_R: torch.Tensor
    list_RC: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> Truncation:
        """For buckets of up to so many rows."""

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            threshold_R=empty(num_rows, dtype=torch.float32),
            last_tie_R=empty(num_rows, dtype=torch.int32),
            pivots_R2P=empty(num_rows, 2, NUM_PIVOTS, dtype=torch.float32),
            sums_RN=empty(num_rows, 2 * NUM_PIVOTS + 1, dtype=torch.int64),
            high_R=empty(num_rows, dtype=torch.float32),
            above_R=empty(num_rows, dtype=torch.int64),
            target_R=empty(num_rows, dtype=torch.int64),
            bounds_R2=empty(num_rows, 2, dtype=torch.float32),
            bound_above_R=empty(num_rows, dtype=torch.int64),
            list_RC=empty(num_rows, LIST_SIZE, dtype=torch.float32),
        )
