"""Whose turn it is: each step is planned once, then updated once. Knows steps, not requests.

One step is open at a time. Its sequences may all have ended before its update (a fault, the end of
the daemon): nothing can come of it then, and it does not stand in the way of the next.
"""

import dataclasses

import numpy as np

from engine_core.scheduler.errors import StepOrderError
from engine_core.scheduler.running_rows import BoolArray, Int64Array, RunningRows
from engine_core.scheduler.sequence import Sequence
from engine_core.scheduler.step import SchedulerOutput


@dataclasses.dataclass(frozen=True, slots=True)
class OpenStep:
    """A step that was planned and not updated."""

    plan: SchedulerOutput
    places: Int64Array
    """The batch's rows, as numpy looks up by them several times as fast as by 32-bit numbers."""
    version: int
    """Of the rows: while it is theirs, none has changed hands."""
    generations: Int64Array
    """Of each row of the batch: it has changed hands since if this is no longer the row's."""
    is_due: BoolArray
    """Which sequences of the batch get a token."""
    planned_s: float

    def position_of(self, sequence: Sequence) -> int | None:
        """Where the sequence stands in the batch."""
        if sequence.row is None:
            return None
        found = (self.places == sequence.row).nonzero()[0]
        return int(found[0]) if len(found) else None

    def has_scheduled(self, sequence: Sequence) -> bool:
        return self.position_of(sequence) is not None

    def num_tokens_of(self, sequence: Sequence) -> int:
        """The sequence's tokens in this step, 0 if it has none."""
        position = self.position_of(sequence)
        return 0 if position is None else int(self.plan.batch.num_scheduled_tokens[position])


class StepTurns:
    """Gives out step ids and holds the open step."""

    def __init__(self, rows: RunningRows) -> None:
        self._rows = rows
        self.next_step_id = 0
        self.open: OpenStep | None = None

    def check_may_plan(self) -> None:
        """
        Raises:
            StepOrderError: a step with live sequences is open.
        """
        if self.open is not None and self._is_live(self.open):
            raise StepOrderError(
                f"step {self.open.plan.step_id} has not been updated; call update_from_output with "
                "its result (or discard_step first, if it has none) before the next schedule"
            )

    def _is_live(self, step: OpenStep) -> bool:
        return bool((self._rows.generation[step.places] == step.generations).any())

    def planned(self, plan: SchedulerOutput, now: float) -> None:
        """`plan` is open now."""
        assert plan.step_id == self.next_step_id
        state, places = self._rows, plan.batch.rows.astype(np.int64)
        self.open = OpenStep(
            plan=plan,
            places=places,
            version=state.version,
            generations=state.generation[places],
            is_due=state.num_computed[places] >= state.num_tokens[places],
            planned_s=now,
        )
        self.next_step_id += 1

    def check_open(self, plan: SchedulerOutput) -> OpenStep:
        """
        Raises:
            StepOrderError: `plan` is not the open one.
        """
        if self.open is None or plan.step_id != self.open.plan.step_id:
            due = "none is due" if self.open is None else f"step {self.open.plan.step_id} is due"
            raise StepOrderError(
                f"step {plan.step_id} is not to be updated, {due}; update each step once, in order"
            )
        return self.open

    def updated(self, plan: SchedulerOutput) -> OpenStep:
        """Close the step of this plan. Returns it.

        Raises:
            StepOrderError: `plan` is not the open one.
        """
        step = self.check_open(plan)
        self.open = None
        return step
