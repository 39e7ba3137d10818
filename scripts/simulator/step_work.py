"""What a step has to compute, in the numbers that its time depends on, and who tells its time."""

import dataclasses
from typing import Protocol

import numpy as np

from engine_core.scheduler.plan import SchedulerOutput

FEATURES = ("step", "tokens", "sequences", "context tokens", "attention pairs", "copied blocks")


@dataclasses.dataclass(frozen=True, slots=True)
class StepWork:
    num_tokens: int
    """Computed in the step."""
    num_sequences: int
    num_sampled: int
    """Of the sequences, those whose tokens are then all computed: each gets a new token."""
    num_context_tokens: int
    """Keys and values read, once a sequence: its tokens up to the last one of this step."""
    num_attention_pairs: int
    """Query-key pairs, each query with itself and all tokens before it."""
    num_copied_blocks: int = 0
    """Between device and host memory."""

    @property
    def features(self) -> tuple[float, ...]:
        """In the order of FEATURES."""
        return (
            1.0,
            self.num_tokens,
            self.num_sequences,
            self.num_context_tokens,
            self.num_attention_pairs,
            self.num_copied_blocks,
        )


def work_of(plan: SchedulerOutput, num_sampled: int) -> StepWork:
    batch, num_tokens = plan.batch, plan.total_num_scheduled_tokens
    num_sequences = len(batch.rows)
    context = int(np.add.reduce(batch.num_computed_tokens, dtype=np.int64)) + num_tokens
    pairs = context
    if num_tokens != num_sequences:  # not all of them compute one token
        computed = batch.num_computed_tokens.astype(np.int64)
        scheduled = batch.num_scheduled_tokens.astype(np.int64)
        pairs = int((scheduled * computed + scheduled * (scheduled + 1) // 2).sum())
    copies = plan.copies
    return StepWork(
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        num_sampled=num_sampled,
        num_context_tokens=context,
        num_attention_pairs=pairs,
        num_copied_blocks=len(copies.swap_in) + len(copies.swap_out),
    )


class StepModel(Protocol):
    """How long a step takes. Must not look at the scheduler. An engine calls it once a step, in
    order, so that a model may draw random numbers."""

    def duration_s(self, work: StepWork) -> float: ...

    def describe(self) -> dict[str, object]:
        """For the report: plain values."""
        ...


class LinearStepModel:
    """Seconds = the sum of features times coefficients, in the order of FEATURES. For tests and for
    hand calculations."""

    def __init__(self, *coefficients: float) -> None:
        self._coefficients = coefficients

    def duration_s(self, work: StepWork) -> float:
        return sum(a * b for a, b in zip(self._coefficients, work.features, strict=False))

    def describe(self) -> dict[str, object]:
        return {"model": "linear", "coefficients": list(self._coefficients)}
