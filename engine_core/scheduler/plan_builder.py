"""Collects one step's plan while the scheduler decides. Decides nothing itself."""

import numpy as np

from engine_core.kv_cache import CacheCopies, TableUpdate
from engine_core.scheduler.batch_state import BatchState, Int32Array
from engine_core.scheduler.plan import (
    BlockUpdate,
    NewRequestData,
    ResumedRequestData,
    ScheduledBatch,
    SchedulerOutput,
)
from engine_core.scheduler.request import Request
from engine_core.scheduler.sequence import Sequence
from engine_core.scheduler.sequence_names import SequenceNames, sampling_params_of


class PlanBuilder:
    """Charges what is added to the budget; `build` counts it as computed: a step that is planned is
    going to run.

    Args:
        token_budget: most tokens of the step.
        step_id: of the step.
        now: seconds, on the scheduler's clock.
    """

    def __init__(self, rows: BatchState, *, token_budget: int, step_id: int, now: float) -> None:
        self.budget = token_budget
        """Tokens left."""
        self.step_id = step_id
        self.now = now
        self.preempted_req_ids: list[str] = []
        self.has_preempted = False
        self._token_budget = token_budget
        self._rows = rows
        self._row_parts: list[Int32Array] = []
        self._count_parts: list[Int32Array] = []
        self._single_rows: list[int] = []
        self._single_counts: list[int] = []
        self._drafts: dict[str, list[int]] = {}
        self._new: dict[str, NewRequestData] = {}
        self._resumed: dict[str, ResumedRequestData] = {}
        self._updates: dict[str, BlockUpdate] = {}

    # ------------------------------------------------------------------ who runs

    def add_rows(self, rows: Int32Array, num_tokens: Int32Array) -> None:
        """These sequences run, each with at least one token."""
        if len(rows):
            self._join_singles()
            self._row_parts.append(rows)
            self._count_parts.append(num_tokens)
            is_decode = num_tokens[num_tokens.argmax()] == 1  # a fraction of the sum's cost
            self.budget -= len(rows) if is_decode else int(num_tokens.sum())
            assert self.budget >= 0

    def add(self, sequence: Sequence, num_tokens: int, drafts: list[int] | None = None) -> None:
        """One sequence runs, with that many tokens, the drafts among them."""
        if drafts:
            self._drafts[sequence.sequence_id] = drafts
        assert sequence.row is not None
        assert 0 < num_tokens <= self.budget
        self._single_rows.append(sequence.row)
        self._single_counts.append(num_tokens)
        self.budget -= num_tokens

    def _join_singles(self) -> None:
        """What was added one by one becomes columns."""
        if self._single_rows:
            self._row_parts.append(np.asarray(self._single_rows, np.int32))
            self._count_parts.append(np.asarray(self._single_counts, np.int32))
            self._single_rows, self._single_counts = [], []

    def is_scheduled(self, sequence: Sequence) -> bool:
        return sequence.row in self._single_rows or any(
            sequence.row in part for part in self._row_parts
        )

    @property
    def is_empty(self) -> bool:
        return not self._single_rows and not any(len(part) for part in self._row_parts)

    def num_tokens_of(self, rows: Int32Array) -> Int32Array:
        """What each of these rows has in the plan so far, 0 for nothing."""
        self._join_singles()
        counts = np.zeros_like(self._rows.num_tokens)
        counts[_joined(self._row_parts)] = _joined(self._count_parts)
        return counts[rows]

    # ------------------------------------------------------------------ what is told of them

    def add_new_sequence(self, sequence: Sequence, block_ids: tuple[list[int], ...]) -> None:
        """All of a sequence that has a row which the runner does not know of, or not as it is."""
        if sequence.is_known_to_runner:
            self._tell_resumed(sequence, block_ids)
        else:
            self._tell_new(sequence, block_ids)

    def _tell_new(self, sequence: Sequence, block_ids: tuple[list[int], ...]) -> None:
        """A sequence that the runner has never seen."""
        assert sequence.row is not None
        sequence.is_known_to_runner = True
        sequence.has_runner_row = True
        self._new[sequence.sequence_id] = NewRequestData(
            req_id=sequence.sequence_id,
            prompt_token_ids=sequence.request.prompt,
            output_token_ids=sequence.output_token_ids,
            mm_features=[],
            sampling_params=sampling_params_of(sequence),
            block_ids=block_ids,
            num_computed_tokens=sequence.num_computed_tokens,
            lora_request=sequence.adapter,
            row=sequence.row,
        )

    def _tell_resumed(self, sequence: Sequence, block_ids: tuple[list[int], ...]) -> None:
        """A sequence that the runner knows, and whose row it dropped or has other tokens in."""
        assert sequence.row is not None
        sequence.has_runner_row = True
        self._resumed[sequence.sequence_id] = ResumedRequestData(
            req_id=sequence.sequence_id,
            row=sequence.row,
            token_ids=sequence.all_token_ids,
            block_ids=block_ids,
            num_computed_tokens=sequence.num_computed_tokens,
        )

    def add_block_update(self, sequence: Sequence, update: TableUpdate) -> None:
        """Ids for the tables of a sequence that the runner has a row for."""
        assert sequence.row is not None
        self._updates[sequence.sequence_id] = BlockUpdate(
            req_id=sequence.sequence_id,
            row=sequence.row,
            start=update.start,
            block_ids=update.block_ids,
        )

    # ------------------------------------------------------------------ who does not, after all

    def drop(self, request: Request) -> None:
        """The request is preempted: what the plan had for it is refunded. Its sequences still have
        their rows."""
        self.has_preempted = True
        self._join_singles()
        gone = [sequence for sequence in request.unfinished if sequence.row is not None]
        rows = np.asarray([sequence.row for sequence in gone], np.int32)
        for index, part in enumerate(self._row_parts):
            is_gone = np.isin(part, rows)
            if is_gone.any():
                self.budget += int(self._count_parts[index][is_gone].sum())
                self._row_parts[index] = part[~is_gone]
                self._count_parts[index] = self._count_parts[index][~is_gone]
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
        names: SequenceNames,
        *,
        copies: CacheCopies,
        num_common_prefix_blocks: list[int],
        finished_req_ids: list[str],
        num_lookahead_slots: int,
    ) -> SchedulerOutput:
        """The finished plan. Its tokens count as computed from here on."""
        self._join_singles()
        state = self._rows
        rows = _joined(self._row_parts)
        counts = _joined(self._count_parts)
        places = rows.astype(np.int64)  # numpy looks up by 64-bit numbers several times as fast
        computed = state.num_computed[places]
        batch = ScheduledBatch(
            req_ids=names.of(rows),
            rows=rows,
            num_computed_tokens=computed,
            num_scheduled_tokens=counts,
        )
        state.num_computed[places] = computed + counts
        return SchedulerOutput(
            step_id=self.step_id,
            batch=batch,
            scheduled_new_reqs=list(self._new.values()),
            resumed_reqs=list(self._resumed.values()),
            block_updates=list(self._updates.values()),
            copies=copies,
            total_num_scheduled_tokens=self._token_budget - self.budget,
            scheduled_spec_decode_tokens=self._drafts,
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=num_common_prefix_blocks,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted_req_ids,
            num_output_tokens=state.lengths(places) - state.num_prompt[places],
            num_lookahead_slots=num_lookahead_slots,
        )


def _joined(parts: list[Int32Array]) -> Int32Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)
