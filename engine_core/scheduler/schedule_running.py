"""The running requests' part of a step: each gets tokens and slots, in order of admission."""

import enum
from collections.abc import Callable

import numpy as np

from engine_core.kv_cache import TableUpdate
from engine_core.scheduler.batch_state import BoolArray, Int32Array, Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.preemption import Preemptor
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.rules.encoder_inputs import EncoderInputRule
from protocol.explanations import PreemptionCause


class Select(enum.Enum):
    """The running sequences that a pass schedules."""

    ALL = enum.auto()
    PREFILLS = enum.auto()
    """Tokens other than the last sampled one are to be computed."""
    DECODES = enum.auto()


class RunningScheduler:
    """Where slots last this is arithmetic on columns, and only sequences that need a new block are
    touched one by one. Where they do not, it goes on request by request.

    Args:
        part_of: which of the rows that can be scheduled this step is for.
        share: lowers what each of them has left, so that a long prompt leaves tokens to shorter
            ones behind it; the others are the most tokens of a sequence, and of the step.
    """

    def __init__(
        self,
        pool: RequestPool,
        preemptor: Preemptor,
        config: SchedulerConfig,
        encoder: EncoderInputRule,
        *,
        part_of: Callable[[Int64Array], Int64Array],
        share: Callable[[Int32Array, int, int], Int32Array],
    ) -> None:
        self._pool = pool
        self._encoder = encoder
        self._part_of = part_of
        self._kv_cache = pool.kv_cache
        self._block_size = pool.kv_cache.block_size
        self._preemptor = preemptor
        self._max_chunk = config.max_chunk
        self._share = share
        self._num_lookahead_slots = config.num_lookahead_slots
        self._max_num_drafts = config.max_num_drafts

    def schedule(self, plan: PlanBuilder, select: Select = Select.ALL) -> None:
        """Spend the plan's budget on running sequences. Never fails for lack of memory: requests
        are preempted, the asking one itself last."""
        batch = self._pool.batch
        rows = self._part_of(batch.schedulable)
        if select is not Select.ALL and len(rows):
            rows = rows[self._is_prefill(rows) == (select is Select.PREFILLS)]
        if not len(rows) or not plan.budget:
            return
        num_uncomputed = batch.lengths(rows) - batch.num_computed_tokens[rows]
        limited = self._encoder.limit_columns(rows, num_uncomputed, plan.budget)
        if limited is not num_uncomputed:
            rows, num_uncomputed = rows[limited > 0], limited[limited > 0]
            if not len(rows):
                return
        computed = batch.num_computed_tokens[rows]
        num_uncomputed = self._share(num_uncomputed, self._max_chunk, plan.budget)
        counts = self._within_budget(rows, num_uncomputed, plan.budget)
        part, computed = rows[: len(counts)], computed[: len(counts)]
        places = self._in_need(part, counts, computed)
        if len(places) > 4:
            places = self._allocate_next_blocks(plan, part, counts, computed, places)
        num_done = self._allocate_at(plan, part, counts, places)
        plan.add_rows(part[:num_done], counts[:num_done])
        if num_done < len(counts):
            self._schedule_by_request(plan, rows[num_done:])

    def schedule_drafts(self, plan: PlanBuilder) -> None:
        """Drafts of scheduled sequences, in order, from the tokens and blocks that are left.
        They preempt no request."""
        batch = self._pool.batch
        if not batch.rows_with_drafts:
            return
        has_drafts = np.zeros(batch.max_num_rows, np.bool_)
        has_drafts[list(batch.rows_with_drafts)] = True
        rows = batch.order[has_drafts[batch.order]]
        num_left = self._max_num_drafts
        for row, count in zip(rows.tolist(), plan.num_tokens_of(rows).tolist(), strict=True):
            if not count:
                continue
            sequence = self._pool.sequence_in(row)
            drafts = sequence.spec_token_ids[: min(plan.budget, num_left)]
            sequence.spec_token_ids = []
            if drafts and self._allocate(plan, sequence, count + len(drafts)):
                plan.add_drafts(sequence, drafts)
                num_left -= len(drafts)

    def _is_prefill(self, rows: Int64Array) -> BoolArray:
        batch = self._pool.batch
        computed = batch.num_computed_tokens[rows]
        is_prefill: BoolArray = (computed < batch.num_prompt_tokens[rows]) | (
            batch.num_tokens[rows] - computed > 1
        )
        return is_prefill

    # ------------------------------------------------------------------ columns

    def _within_budget(
        self, rows: Int64Array, num_uncomputed: Int32Array, budget: int
    ) -> Int32Array:
        """Tokens for the first rows, each at least 1; the last may get fewer than it needs. The
        sequences of one request all get some, or none does."""
        # argmin and argmax cost a fraction of min, max and cumsum where rows are few
        assert num_uncomputed[num_uncomputed.argmin()] > 0, "a running sequence has nothing to run"
        most = int(num_uncomputed[num_uncomputed.argmax()])
        if most > self._max_chunk:
            num_uncomputed, most = np.minimum(num_uncomputed, self._max_chunk), self._max_chunk
        if most * len(num_uncomputed) <= budget:
            return num_uncomputed
        ends = np.cumsum(num_uncomputed)
        if ends[-1] <= budget:
            return num_uncomputed
        num_rows = int(np.searchsorted(ends, budget, side="left")) + 1
        counts = num_uncomputed[:num_rows].copy()
        counts[-1] -= ends[num_rows - 1] - budget
        return self._whole_requests(rows, num_uncomputed, counts, budget)

    def _whole_requests(
        self, rows: Int64Array, num_uncomputed: Int32Array, counts: Int32Array, budget: int
    ) -> Int32Array:
        """`counts` for the first rows, changed if they end between two sequences of a request: all
        of them then share what is left, or get nothing if there is not a token for each."""
        first, stop = len(counts) - 1, len(counts)
        request = self._pool.sequence_in(rows[first]).request
        while stop < len(rows) and self._pool.sequence_in(rows[stop]).request is request:
            stop += 1
        if stop == len(counts):
            return counts
        while first and self._pool.sequence_in(rows[first - 1]).request is request:
            first -= 1
        share = (budget - int(counts[:first].sum())) // (stop - first)
        if not share:
            return counts[:first]
        return np.concatenate((counts[:first], np.minimum(num_uncomputed[first:stop], share)))

    def _in_need(self, rows: Int64Array, counts: Int32Array, computed: Int32Array) -> Int64Array:
        """Places of the rows that lack slots for their tokens, or fill a block."""
        ends = computed + counts
        if self._num_lookahead_slots:
            ends += self._num_lookahead_slots
        needs_blocks = ends > self._pool.batch.num_allocated_slots[rows]
        if counts[counts.argmax()] > 1:
            # blocks that a chunk fills enter the prefix cache now, also where no new one is needed
            needs_blocks |= counts > 1
        return needs_blocks.nonzero()[0]

    def _allocate_at(
        self, plan: PlanBuilder, rows: Int64Array, counts: Int32Array, places: Int64Array
    ) -> int:
        """Slots for the rows at these places. Returns how many of all rows have theirs: all, or
        those before the first for which no block is left."""
        sequences, num_slots = self._pool.sequences, self._num_lookahead_slots
        for index in places.tolist():
            sequence = sequences[rows[index]]
            assert sequence is not None
            update = self._kv_cache.allocate_slots(sequence, int(counts[index]), num_slots)
            if update is None:
                return int(index)
            self._write_table(plan, sequence, update)
        return len(rows)

    def _allocate_next_blocks(
        self,
        plan: PlanBuilder,
        rows: Int64Array,
        counts: Int32Array,
        computed: Int32Array,
        places: Int64Array,
    ) -> Int64Array:
        """A block for each of the decodes at these places of `rows` whose last block is just full,
        all at once, where there are enough for the others too. Returns the places that are left."""
        batch, next_blocks, size = self._pool.batch, self._kv_cache.next_blocks, self._block_size
        most_wanted = len(places) * (1 + int(counts[counts.argmax()]) // size)
        if most_wanted > self._kv_cache.num_blocks_free:
            return places
        if next_blocks is None or self._num_lookahead_slots:
            return places
        starts, own_rows = computed[places], rows[places]
        is_full = (starts % size == 0) & (starts <= batch.num_tokens[own_rows]) & (starts > 0)
        is_full &= counts[places] == 1
        ready = is_full.nonzero()[0]
        if not len(ready):
            return places
        starts, own_rows = starts[ready], own_rows[ready]
        filled = batch.token_ids[own_rows[:, None], starts[:, None] + np.arange(-size, 0)]
        sequences = [self._pool.sequence_in(row) for row in own_rows.tolist()]
        indexes = (starts // size).tolist()
        found = next_blocks.allocate(sequences, indexes, filled.tobytes())
        for place, block_id in found.items():
            sequence = sequences[place]
            if sequence.has_runner_row:
                plan.add_next_block(sequence, indexes[place], block_id)
            else:
                plan.add_new_sequence(sequence, self._kv_cache.block_ids(sequence))
        done = np.fromiter(found, np.int64, len(found))
        batch.num_allocated_slots[own_rows[done]] = starts[done] + size
        return np.delete(places, ready[done])

    def _allocate(self, plan: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        update = self._kv_cache.allocate_slots(sequence, num_tokens, self._num_lookahead_slots)
        if update is not None:
            self._write_table(plan, sequence, update)
        return update is not None

    def _write_table(self, plan: PlanBuilder, sequence: Sequence, update: TableUpdate) -> None:
        num_slots = update.num_blocks * self._kv_cache.block_size
        self._pool.batch.num_allocated_slots[sequence.row] = num_slots
        if not sequence.has_runner_row:
            plan.add_new_sequence(sequence, self._kv_cache.block_ids(sequence))
        elif not update.is_empty:
            plan.add_block_update(sequence, update)

    # ------------------------------------------------------------------ request by request

    def _schedule_by_request(self, plan: PlanBuilder, rows: Int64Array) -> None:
        """Blocks are short."""
        requests: dict[str, list[Sequence]] = {}
        for row in rows.tolist():
            sequence = self._pool.sequence_in(row)
            requests.setdefault(sequence.request.request_id, []).append(sequence)
        for sequences in requests.values():
            request = sequences[0].request
            if request.status is not RequestStatus.RUNNING:
                continue  # it was preempted for one before it
            if plan.budget < len(sequences) or not self._schedule_request(plan, request, sequences):
                break

    def _schedule_request(
        self, plan: PlanBuilder, request: Request, sequences: list[Sequence]
    ) -> bool:
        """All of the request's sequences, or none. False if it was itself preempted."""
        for num_behind, sequence in zip(range(len(sequences) - 1, -1, -1), sequences, strict=True):
            if plan.is_scheduled(sequence):
                continue
            budget = plan.budget - num_behind
            num_in_flight = int(self._pool.batch.num_output_placeholders[sequence.row])
            num_left = sequence.num_tokens + num_in_flight - sequence.num_computed_tokens
            num_tokens = min(num_left, self._max_chunk, budget)
            num_tokens = self._encoder.limit(sequence, num_tokens)
            if not num_tokens:
                continue
            if num_in_flight:  # not certain: no request is preempted for it
                if not self._allocate(plan, sequence, num_tokens):
                    continue
            elif not self._preempt_until_allocated(plan, request, sequence, num_tokens):
                return False
            plan.add_sequence(sequence, num_tokens)
        return True

    def _preempt_until_allocated(
        self, plan: PlanBuilder, request: Request, sequence: Sequence, num_tokens: int
    ) -> bool:
        """False if the request itself was preempted in the end."""
        while not self._allocate(plan, sequence, num_tokens):
            victim = self._pool.policy.select_victim(self._pool.running, request)
            needed = f"request {request.request_id!r} needed a KV block"
            free = f"{self._kv_cache.num_blocks_free} of {self._kv_cache.num_blocks} were free"
            self._preemptor.preempt(victim, plan, PreemptionCause.BLOCKS, f"{needed}, {free}")
            if victim is request:
                return False
        return True
