"""Steps that were planned and not updated, and what may be scheduled behind them. Each step is
planned once, then updated once, in order."""

import dataclasses
from collections import deque

import numpy as np

from engine_core.scheduler.batch_state import BatchState, BoolArray, Int64Array
from engine_core.scheduler.errors import StepOrderError
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.request import Sequence
from engine_core.scheduler.request_pool import RequestPool


class RowSnapshot:
    """Some rows, and which sequences have them at this moment."""

    __slots__ = ("_batch", "_positions", "_version", "generations", "rows")

    def __init__(self, batch: BatchState, rows: Int64Array) -> None:
        self._batch = batch
        self.rows = rows
        self.generations: Int64Array = batch.generation[rows]
        self._version = batch.version
        self._positions: dict[int, int] | None = None
        """Places in `rows` by row; made when they are first asked for."""

    @property
    def all_unchanged(self) -> bool:
        """True only if all rows still have the same sequences; O(1)."""
        return self._version == self._batch.version

    def unchanged(self) -> BoolArray:
        """Whether each row still has the same sequence."""
        unchanged: BoolArray = self._batch.generation[self.rows] == self.generations
        return unchanged

    def unchanged_rows(self) -> Int64Array:
        return self.rows if self.all_unchanged else self.rows[self.unchanged()]

    def position_of(self, sequence: Sequence) -> int | None:
        """The sequence's place in `rows`; None also if it had another row then, or the row had
        another sequence."""
        if sequence.row is None:
            return None
        if self._positions is None:
            self._positions = {row: place for place, row in enumerate(self.rows.tolist())}
        position = self._positions.get(sequence.row)
        if position is None:
            return None
        is_its = self.generations[position] == self._batch.generation[sequence.row]
        return position if is_its else None


@dataclasses.dataclass(slots=True)  # one a step: frozen takes a microsecond more
class InFlightStep:
    """A step that was planned and not updated."""

    plan: SchedulerOutput
    batch: RowSnapshot
    needs_sampling: BoolArray
    """Whether each sequence of the batch gets a token."""
    planned_s: float
    is_behind: bool
    """Whether another step was in flight when it was planned: the device ran that one first. A
    pipeline's stages run both at once."""
    placeholders: RowSnapshot | None = None
    """Rows that have one output placeholder more until this step is updated."""
    blocked: RowSnapshot | None = None
    """Rows that are not schedulable until this step is updated."""
    is_discarded: bool = False
    """Whether it, or a step before it, failed: it has no result."""


class InFlightSteps:
    """The queue of steps in flight. With two of them, for one sequence:

        host     plan n       plan n+1     update n      plan n+2     update n+1
                 computes a   computes b   b is known    computes c   c is known
        device     [ a: samples b ][ b: samples c ][ c: samples d ] ...

    When step n+1 is planned, b is an output placeholder: one token more to compute, with a slot of
    its own; the device passes its value on. Where it is not sure that there will be a next token,
    or the host has a part in it, the sequence is blocked until the result is known: at its last
    token by length, with drafts to verify, for beams, and before a fork. A sequence that ends at b
    (end-of-sequence, abort) computes one token more: its row has another owner by then, and the
    result is dropped. A prompt chunk that is not the last samples nothing, so it needs neither.

    With `is_pipeline` the first stage would need b while another stage computes it: each sequence
    is blocked until its token is known, and the steps in flight are of different sequences."""

    def __init__(
        self, pool: RequestPool, max_steps_in_flight: int, *, is_pipeline: bool = False
    ) -> None:
        self._pool = pool
        self._is_pipeline = is_pipeline
        self._batch = pool.batch
        self.max_steps_in_flight = max_steps_in_flight
        self.next_step_id = 0
        self._steps: deque[InFlightStep] = deque()

    @property
    def steps(self) -> list[InFlightStep]:
        """The steps in flight, the oldest first."""
        return list(self._steps)

    def num_tokens_in_flight(self, sequence: Sequence) -> int:
        """The sequence's tokens in all steps in flight."""
        num_tokens = 0
        for step in self._steps:
            position = step.batch.position_of(sequence)
            if position is not None:
                num_tokens += int(step.plan.batch.num_scheduled_tokens[position])
        return num_tokens

    def check_may_plan(self) -> None:
        """A step whose sequences have all ended can bring nothing, and is dropped where it would
        stand in the way.
        Raises StepOrderError: `max_steps_in_flight` steps have not been updated."""
        if len(self._steps) < self.max_steps_in_flight:
            return
        first = self._steps[0]
        if first.batch.unchanged().any():
            raise StepOrderError(
                f"step {first.plan.step_id} has not been updated; call update_from_output with "
                "its result (or discard_step first, if it has none) before the next schedule"
            )
        self._pop_first()

    def add(self, plan: SchedulerOutput, now: float) -> None:
        """`plan` is in flight now."""
        assert plan.step_id == self.next_step_id
        batch = self._batch
        rows = RowSnapshot(batch, plan.batch.rows)
        needs_sampling: BoolArray = batch.num_computed_tokens[rows.rows] >= batch.lengths(rows.rows)
        is_behind = bool(self._steps) and not self._is_pipeline
        step = InFlightStep(plan, rows, needs_sampling, now, is_behind)
        if self.max_steps_in_flight > 1:
            self._mark(step)
        self._steps.append(step)
        batch.num_steps_in_flight = len(self._steps)
        self.next_step_id += 1

    def check_is_first(self, plan: SchedulerOutput) -> None:
        """Raises StepOrderError: `plan` is not the first of the steps in flight."""
        if not self._steps or plan.step_id != self._steps[0].plan.step_id:
            steps = self._steps
            expected = f"step {steps[0].plan.step_id} is next" if steps else "none is in flight"
            raise StepOrderError(
                f"step {plan.step_id} is not to be updated, {expected}; update each step once, in "
                "order"
            )

    def remove(self, plan: SchedulerOutput) -> InFlightStep:
        """The step of this plan, which must be the first, is updated."""
        self.check_is_first(plan)
        return self._pop_first()

    def _mark(self, step: InFlightStep) -> None:
        """Placeholders and blocked rows of a new step."""
        batch, rows = self._batch, step.batch.rows
        may_schedule_async = batch.may_schedule_async[rows]
        goes_on = batch.lengths(rows) + 1 < batch.max_len[rows]
        goes_on &= may_schedule_async
        goes_on &= step.needs_sampling
        goes_on &= ~batch.is_constrained[rows]
        goes_on &= not self._is_pipeline
        drafts = step.plan.scheduled_spec_decode_tokens
        if drafts:
            goes_on &= np.array([name not in drafts for name in step.plan.batch.req_ids])
        step.placeholders = step.batch
        if np.count_nonzero(goes_on) < len(rows):
            step.placeholders = RowSnapshot(batch, rows[goes_on])
            is_blocked = (step.needs_sampling | ~may_schedule_async) & ~goes_on
            step.blocked = RowSnapshot(batch, self._with_all_beams(rows[is_blocked]))
            batch.is_blocked[step.blocked.rows] = True
        batch.num_output_placeholders[step.placeholders.rows] += 1

    def _with_all_beams(self, blocked: Int64Array) -> Int64Array:
        """Beams advance together: while one is blocked, all are."""
        beams = blocked[~self._batch.may_schedule_async[blocked]]
        if not len(beams):
            return blocked
        rows = set(blocked.tolist())
        for row in beams.tolist():
            request = self._pool.sequence_in(row).request
            rows.update(seq.row for seq in request.unfinished if seq.row is not None)
        return np.array(sorted(rows), np.int64)

    def _pop_first(self) -> InFlightStep:
        step = self._steps.popleft()
        if step.placeholders is not None:
            self._batch.num_output_placeholders[step.placeholders.unchanged_rows()] -= 1
        if step.blocked is not None:
            self._batch.is_blocked[step.blocked.unchanged_rows()] = False
        self._batch.num_steps_in_flight = len(self._steps)
        return step

    def check(self) -> None:
        """Assert that rows have just the placeholders and blocks of the steps in flight, and that
        every other row has something to compute."""
        batch, order = self._batch, self._batch.order
        assert batch.num_steps_in_flight == len(self._steps) <= self.max_steps_in_flight
        if self.max_steps_in_flight == 1 and self._steps:
            return
        num_placeholders = np.zeros_like(batch.num_output_placeholders)
        is_blocked = np.zeros_like(batch.is_blocked)
        for step in self._steps:
            assert step.placeholders is not None
            num_placeholders[step.placeholders.unchanged_rows()] += 1
            if step.blocked is not None:
                is_blocked[step.blocked.unchanged_rows()] = True
        assert (num_placeholders[order] == batch.num_output_placeholders[order]).all()
        assert (is_blocked[order] == batch.is_blocked[order]).all()
        num_left = batch.lengths(order) - batch.num_computed_tokens[order]
        assert (is_blocked[order] | (num_left > 0)).all()
