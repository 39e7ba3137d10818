"""How a step's plan is collected: sequences and tokens are added, and charged to its budget."""

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
    """What is added is charged to the budget. `now`: seconds, on the scheduler's clock."""

    def __init__(self, batch: BatchState, *, token_budget: int, step_id: int, now: float) -> None:
        self.budget = token_budget
        """Tokens that may still be scheduled."""
        self.step_id = step_id
        self.now = now
        self.preempted_req_ids: list[str] = []
        self.has_preempted = False
        self.num_drafts_wanted: Int64Array | None = None
        """See `SchedulerOutput.num_drafts_wanted`."""
        self._token_budget = token_budget
        self._batch = batch
        self._rows: list[Int64Array] = []
        self._counts: list[Int32Array] = []
        self._single_rows: list[int] = []
        self._single_counts: list[int] = []
        self._scheduled: set[int] | None = None
        """Rows of the plan; made when it is first asked for."""
        self._drafts: dict[str, list[int]] = {}
        self._num_decode_steps: Int32Array | None = None
        self._new: dict[str, NewRequestData] = {}
        self._resumed: dict[str, ResumedRequestData] = {}
        self._updates: dict[str, BlockUpdate] = {}

    def follow_up(self, preempted_req_ids: list[str]) -> None:
        """Sequences lost their rows before this step; if any did, no request is admitted in it."""
        self.preempted_req_ids = preempted_req_ids
        self.has_preempted = bool(preempted_req_ids)

    # ------------------------------------------------------------------ tokens

    def add_rows(self, rows: Int64Array, num_tokens: Int32Array) -> None:
        """Schedule these sequences, each with at least one token."""
        if len(rows):
            self._join_singles()
            self._rows.append(rows)
            self._counts.append(num_tokens)
            self._scheduled = None
            is_decode = num_tokens[num_tokens.argmax()] == 1  # a fraction of the sum's cost
            self.budget -= len(rows) if is_decode else int(num_tokens.sum())
            assert self.budget >= 0

    def add_sequence(self, sequence: Sequence, num_tokens: int) -> None:
        """Schedule one sequence with that many tokens."""
        assert sequence.row is not None
        assert 0 < num_tokens <= self.budget
        self._single_rows.append(sequence.row)
        self._single_counts.append(num_tokens)
        if self._scheduled is not None:
            self._scheduled.add(sequence.row)
        self.budget -= num_tokens

    def add_drafts(self, sequence: Sequence, drafts: list[int]) -> None:
        """Add drafts behind a scheduled sequence's tokens. No request may be dropped afterwards."""
        assert 0 < len(drafts) <= self.budget
        self._drafts[sequence.sequence_id] = drafts
        self.budget -= len(drafts)

    def decode_several(self, num_steps: Int32Array) -> None:
        """The plan is complete and decodes only: so many steps of each sequence, in the order of
        `scheduled_rows`. The budget bounds what is computed at once, so only the first counts."""
        self._num_decode_steps = num_steps

    @property
    def scheduled_rows(self) -> tuple[Int64Array, Int32Array]:
        """Every row of the plan so far, and its tokens without drafts."""
        self._join_singles()
        return _joined(self._rows, np.int64), _joined(self._counts, np.int32)

    @property
    def has_drafts(self) -> bool:
        return bool(self._drafts)

    def _join_singles(self) -> None:
        """Sequences that were added one by one become columns."""
        if self._single_rows:
            self._rows.append(np.asarray(self._single_rows, np.int64))
            self._counts.append(np.asarray(self._single_counts, np.int32))
            self._single_rows, self._single_counts = [], []

    def is_scheduled(self, sequence: Sequence) -> bool:
        if self._scheduled is None:
            self._scheduled = set(self.scheduled_rows[0].tolist())
        return sequence.row in self._scheduled

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
        request, content = sequence.request, sequence.request.content
        self._new[name] = NewRequestData(
            req_id=name,
            prompt_token_ids=request.prompt,
            output_token_ids=sequence.output_token_ids,
            mm_features=content.features,
            sampling_params=sequence.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=sequence.num_computed_tokens,
            lora_request=sequence.adapter,
            row=row,
            prompt_embeds=content.embeds,
            pooling_params=request.message.pooling_params,
        )

    def add_block_update(self, sequence: Sequence, update: TableUpdate) -> None:
        """Ids for the block tables of a sequence that has a runner row."""
        name, row = sequence.sequence_id, sequence.row
        assert row is not None
        start, block_ids = update.start, update.block_ids
        earlier = self._updates.get(name)  # of this step, before there was room for its drafts
        if earlier is not None and earlier.start < start:
            kept = [table[: start - earlier.start] for table in earlier.block_ids]
            block_ids = tuple([old + new for old, new in zip(kept, block_ids, strict=True)])
            start = earlier.start
        self._updates[name] = BlockUpdate(name, row, start, block_ids)

    def add_next_block(self, sequence: Sequence, index: int, block_id: int) -> None:
        """`add_block_update` of one block behind the last, in one table, and the first of the step
        for this sequence."""
        name, row = sequence.sequence_id, sequence.row
        assert row is not None
        self._updates[name] = BlockUpdate(name, row, index, ([block_id],))

    def drop(self, request: Request) -> None:
        """The request is preempted after it was scheduled: its tokens are refunded. Its sequences
        still have their rows."""
        self.has_preempted = True
        assert not self._drafts
        self._join_singles()
        gone = [sequence for sequence in request.unfinished if sequence.row is not None]
        rows = np.asarray([sequence.row for sequence in gone], np.int64)
        if self._scheduled is not None:
            self._scheduled.difference_update(rows.tolist())
        for index, part in enumerate(self._rows):
            is_gone = np.isin(part, rows)
            if is_gone.any():
                self.budget += int(self._counts[index][is_gone].sum())
                self._rows[index] = part[~is_gone]
                self._counts[index] = self._counts[index][~is_gone]
        for sequence in gone:
            name = sequence.sequence_id
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
        state, (rows, counts) = self._batch, self.scheduled_rows
        num_tokens, num_decode_steps = self._token_budget - self.budget, 1
        if self._num_decode_steps is not None:
            counts = self._num_decode_steps
            num_tokens, num_decode_steps = int(counts.sum()), int(counts.max())
        req_ids = sequence_ids.of(rows)
        if self._drafts:
            num_drafts = [len(self._drafts.get(name, ())) for name in req_ids]
            counts = counts + np.array(num_drafts, np.int32)
        computed = state.num_computed_tokens[rows]
        state.num_computed_tokens[rows] = computed + counts
        return SchedulerOutput(
            step_id=self.step_id,
            batch=ScheduledBatch(
                req_ids=req_ids,
                rows=rows,
                num_computed_tokens=computed,
                num_scheduled_tokens=counts,
            ),
            scheduled_new_reqs=list(self._new.values()),
            resumed_reqs=list(self._resumed.values()),
            block_updates=list(self._updates.values()),
            copies=copies,
            total_num_scheduled_tokens=num_tokens,
            scheduled_spec_decode_tokens=self._drafts,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            num_output_tokens=state.lengths(rows) - state.num_prompt_tokens[rows],
            num_lookahead_slots=num_lookahead_slots,
            num_drafts_wanted=self.num_drafts_wanted,
            num_decode_steps=num_decode_steps,
            token_budget=self._token_budget,
        )


def _joined(parts: list[Any], dtype: type[np.generic]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)
