"""Whose turn it is: each step is planned once, then updated once. Knows steps, not requests.

One step is open at a time, or as many as may be in flight; they are updated in the order in which
they were planned. A step's sequences may all have ended before its update (a fault, the end of the
daemon): nothing can come of it then, and it does not stand in the way of the next.
"""

import dataclasses
from collections import deque

import numpy as np

from engine_core.scheduler.async_scheduling import AsyncScheduling, PlacedRows
from engine_core.scheduler.batch_state import BatchState, BoolArray
from engine_core.scheduler.errors import StepOrderError
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.sequence import Sequence


@dataclasses.dataclass(slots=True)  # one a step: frozen takes a microsecond more
class InFlightStep:
    """A step that was planned and not updated."""

    plan: SchedulerOutput
    batch: PlacedRows
    needs_sampling: BoolArray
    """Which sequences of the batch get a token."""
    planned_s: float
    is_behind: bool
    """Whether another step was open when it was planned: the device had that to do first."""
    steps_ahead: AsyncScheduling | None
    is_discarded: bool = False
    """Whether it, or a step before it, failed: its requests have ended."""

    def position_of(self, sequence: Sequence) -> int | None:
        """Where the sequence stands in the batch; None also if it had another row then, or this
        row at another time."""
        if sequence.row is None:
            return None
        batch = self.batch
        found = (batch.places == sequence.row).nonzero()[0]
        if not len(found):
            return None
        position = int(found[0])
        is_its = batch.generations[position] == batch.rows.generation[sequence.row]
        return position if is_its else None

    def num_tokens_of(self, sequence: Sequence) -> int:
        """The sequence's tokens in this step, 0 if it has none."""
        position = self.position_of(sequence)
        return 0 if position is None else int(self.plan.batch.num_scheduled_tokens[position])


class InFlightSteps:
    """Gives out step ids and holds the open steps.

    Args:
        max_steps_in_flight: most steps open at a time.
    """

    def __init__(self, rows: BatchState, max_steps_in_flight: int = 1) -> None:
        self._rows = rows
        self.max_steps_in_flight = max_steps_in_flight
        self.next_step_id = 0
        self._open: deque[InFlightStep] = deque()

    @property
    def open(self) -> list[InFlightStep]:
        """In order."""
        return list(self._open)

    def num_tokens_in_flight(self, sequence: Sequence) -> int:
        """The sequence's tokens in all open steps."""
        return sum(step.num_tokens_of(sequence) for step in self._open)

    def check_may_plan(self) -> None:
        """
        Raises:
            StepOrderError: as many steps as may be are open, the first of them with live sequences.
        """
        if len(self._open) < self.max_steps_in_flight:
            return
        first = self._open[0]
        if first.batch.unchanged().any():
            raise StepOrderError(
                f"step {first.plan.step_id} has not been updated; call update_from_output with "
                "its result (or discard_step first, if it has none) before the next schedule"
            )
        self._close()

    def planned(self, plan: SchedulerOutput, now: float) -> None:
        """`plan` is open now."""
        assert plan.step_id == self.next_step_id
        rows = self._rows
        batch = PlacedRows(rows, plan.batch.rows.astype(np.int64))
        needs_sampling: BoolArray = rows.num_computed[batch.places] >= rows.lengths(batch.places)
        steps_ahead = None
        if self.max_steps_in_flight > 1:
            steps_ahead = AsyncScheduling.behind(plan, batch, needs_sampling)
        self._open.append(
            InFlightStep(plan, batch, needs_sampling, now, bool(self._open), steps_ahead)
        )
        rows.num_open_steps = len(self._open)
        self.next_step_id += 1

    def check_open(self, plan: SchedulerOutput) -> InFlightStep:
        """
        Raises:
            StepOrderError: `plan` is not the first of the open ones.
        """
        if not self._open or plan.step_id != self._open[0].plan.step_id:
            due = f"step {self._open[0].plan.step_id} is due" if self._open else "none is due"
            raise StepOrderError(
                f"step {plan.step_id} is not to be updated, {due}; update each step once, in order"
            )
        return self._open[0]

    def updated(self, plan: SchedulerOutput) -> InFlightStep:
        """Close the step of this plan. Returns it.

        Raises:
            StepOrderError: `plan` is not the first of the open ones.
        """
        step = self.check_open(plan)
        self._close()
        return step

    def check(self) -> None:
        """Assert that rows are ahead or held just as the open steps have it, and that every other
        one has something to run."""
        rows, order = self._rows, self._rows.order
        assert rows.num_open_steps == len(self._open) <= self.max_steps_in_flight
        if self.max_steps_in_flight == 1 and self._open:
            return
        num_ahead, is_blocked = np.zeros_like(rows.num_ahead), np.zeros_like(rows.is_blocked)
        for step in self._open:
            assert step.steps_ahead is not None
            num_ahead[step.steps_ahead.ahead.unchanged_places()] += 1
            if step.steps_ahead.held is not None:
                is_blocked[step.steps_ahead.held.unchanged_places()] = True
        assert (num_ahead[order] == rows.num_ahead[order]).all()
        assert (is_blocked[order] == rows.is_blocked[order]).all()
        num_left = rows.lengths(order.astype(np.int64)) - rows.num_computed[order]
        assert (is_blocked[order] | (num_left > 0)).all()

    def _close(self) -> None:
        """The first of the open steps."""
        step = self._open.popleft()
        if step.steps_ahead is not None:
            step.steps_ahead.release()
        self._rows.num_open_steps = len(self._open)
