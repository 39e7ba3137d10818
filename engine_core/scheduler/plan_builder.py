"""Collects one step's plan while the scheduler decides. Decides nothing itself."""

from typing import Any

import numpy as np

from engine_core.kv_cache import BlockIds, CacheCopies, TableUpdate
from engine_core.scheduler.batch_state import BatchState, IdsOfRows, Int32Array, Int64Array
from engine_core.scheduler.plan import (
    BlockUpdate,
    NewRequestData,
    ResumedRequestData,
    ScheduledBatch,
    SchedulerOutput,
)
from engine_core.scheduler.request import Request, Sequence


class PlanBuilder:
    """What is added is charged to the budget.

    Args:
        now: seconds, on the scheduler's clock.
    """

    def __init__(self, batch: BatchState, *, token_budget: int, step_id: int, now: float) -> None:
        self.budget = token_budget
        """Tokens left."""
        self.step_id = step_id
        self.now = now
        self.preempted_req_ids: list[str] = []
        self.has_preempted = False
        self._token_budget = token_budget
        self._batch = batch
        self._rows: list[Int64Array] = []
        self._counts: list[Int32Array] = []
        self._single_rows: list[int] = []
        self._single_counts: list[int] = []
        self._drafts: dict[str, list[int]] = {}
        self._new: dict[str, NewRequestData] = {}
        self._resumed: dict[str, ResumedRequestData] = {}
        self._updates: dict[str, BlockUpdate] = {}

    # ------------------------------------------------------------------ tokens

    def add_rows(self, rows: Int64Array, num_tokens: Int32Array) -> None:
        """Schedule these sequences, each with at least one token."""
        if len(rows):
            self._join_singles()
            self._rows.append(rows)
            self._counts.append(num_tokens)
            is_decode = num_tokens[num_tokens.argmax()] == 1  # a fraction of the sum's cost
            self.budget -= len(rows) if is_decode else int(num_tokens.sum())
            assert self.budget >= 0

    def add_sequence(
        self, sequence: Sequence, num_tokens: int, drafts: list[int] | None = None
    ) -> None:
        """Schedule one sequence with that many tokens, drafts included."""
        if drafts:
            self._drafts[sequence.sequence_id] = drafts
        assert sequence.row is not None
        assert 0 < num_tokens <= self.budget
        self._single_rows.append(sequence.row)
        self._single_counts.append(num_tokens)
        self.budget -= num_tokens

    def _join_singles(self) -> None:
        """Sequences that were added one by one become columns."""
        if self._single_rows:
            self._rows.append(np.asarray(self._single_rows, np.int64))
            self._counts.append(np.asarray(self._single_counts, np.int32))
            self._single_rows, self._single_counts = [], []

    def is_scheduled(self, sequence: Sequence) -> bool:
        return sequence.row in self._single_rows or any(sequence.row in part for part in self._rows)

    @property
    def is_empty(self) -> bool:
        return not self._single_rows and not any(len(part) for part in self._rows)

    def num_tokens_of(self, rows: Int64Array) -> Int32Array:
        """Tokens scheduled so far for each of these rows."""
        self._join_singles()
        counts = np.zeros_like(self._batch.num_tokens)
        counts[_joined(self._rows, np.int64)] = _joined(self._counts, np.int32)
        return counts[rows]

    # ------------------------------------------------------------------ updates for the runner

    def add_new_sequence(self, sequence: Sequence, block_ids: BlockIds) -> None:
        """All of a sequence whose row the runner does not have, or not with these tokens."""
        name, row = sequence.sequence_id, sequence.row
        assert row is not None
        sequence.has_runner_row = True
        if sequence.is_known_to_runner:
            self._resumed[name] = ResumedRequestData(
                req_id=name,
                row=row,
                token_ids=sequence.all_token_ids,
                block_ids=block_ids,
                num_computed_tokens=sequence.num_computed_tokens,
            )
            return
        sequence.is_known_to_runner = True
        self._new[name] = NewRequestData(
            req_id=name,
            prompt_token_ids=sequence.request.prompt,
            output_token_ids=sequence.output_token_ids,
            mm_features=[],
            sampling_params=sequence.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=sequence.num_computed_tokens,
            lora_request=sequence.adapter,
            row=row,
        )

    def add_block_update(self, sequence: Sequence, update: TableUpdate) -> None:
        """Ids for the block tables of a sequence that has a runner row."""
        name, row = sequence.sequence_id, sequence.row
        assert row is not None
        self._updates[name] = BlockUpdate(name, row, update.start, update.block_ids)

    def drop(self, request: Request) -> None:
        """The request is preempted after it was scheduled: its tokens are refunded. Its sequences
        still have their rows."""
        self.has_preempted = True
        self._join_singles()
        gone = [sequence for sequence in request.unfinished if sequence.row is not None]
        rows = np.asarray([sequence.row for sequence in gone], np.int64)
        for index, part in enumerate(self._rows):
            is_gone = np.isin(part, rows)
            if is_gone.any():
                self.budget += int(self._counts[index][is_gone].sum())
                self._rows[index] = part[~is_gone]
                self._counts[index] = self._counts[index][~is_gone]
        for sequence in gone:
            name = sequence.sequence_id
            self._drafts.pop(name, None)
            self._updates.pop(name, None)
            self._resumed.pop(name, None)
            if self._new.pop(name, None) is not None:
                sequence.is_known_to_runner = False
            elif sequence.is_known_to_runner:
                self.preempted_req_ids.append(name)

    # ------------------------------------------------------------------ the plan

    def build(
        self,
        sequence_ids: IdsOfRows,
        *,
        copies: CacheCopies,
        finished_req_ids: list[str],
        num_lookahead_slots: int,
    ) -> SchedulerOutput:
        """The finished plan. Its tokens count as computed from here on."""
        self._join_singles()
        state = self._batch
        rows, counts = _joined(self._rows, np.int64), _joined(self._counts, np.int32)
        computed = state.num_computed_tokens[rows]
        state.num_computed_tokens[rows] = computed + counts
        return SchedulerOutput(
            step_id=self.step_id,
            batch=ScheduledBatch(
                req_ids=sequence_ids.of(rows),
                rows=rows,
                num_computed_tokens=computed,
                num_scheduled_tokens=counts,
            ),
            scheduled_new_reqs=list(self._new.values()),
            resumed_reqs=list(self._resumed.values()),
            block_updates=list(self._updates.values()),
            copies=copies,
            total_num_scheduled_tokens=self._token_budget - self.budget,
            scheduled_spec_decode_tokens=self._drafts,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            num_output_tokens=state.lengths(rows) - state.num_prompt_tokens[rows],
            num_lookahead_slots=num_lookahead_slots,
        )


def _joined(parts: list[Any], dtype: type[np.generic]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
