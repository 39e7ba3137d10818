"""The running requests' turn in a step: each gets tokens and slots, in order of admission.

Owns the split of the budget among them, and who is preempted for whom. Must not know the waiting
queue. Where slots last, the turn is arithmetic on columns, and only sequences that need a new block
are touched one by one; where they do not, it goes on request by request (`_go_on_carefully`).
"""

import enum

import numpy as np

from engine_core.kv_cache import KVCacheManager, TableUpdate
from engine_core.scheduler.batch_state import Int32Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import Preemptor
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence


class Select(enum.Enum):
    """Which running sequences a turn is for."""

    ALL = enum.auto()
    PREFILLS = enum.auto()
    """Tokens are to be computed that were not sampled last."""
    DECODES = enum.auto()


class RunningScheduler:
    """Schedules the running sequences."""

    def __init__(
        self,
        live: RequestPool,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        preemptor: Preemptor,
        config: SchedulerConfig,
    ) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._policy = policy
        self._preemptor = preemptor
        self._max_chunk = config.max_chunk
        self._num_lookahead_slots = config.num_lookahead_slots

    def fill(self, plan: PlanBuilder, select: Select = Select.ALL) -> None:
        """Spend the plan's budget on running sequences. Never fails for lack of memory: requests
        are preempted, the last of them the one that asks."""
        state = self._live.rows
        rows = state.schedulable
        if select is not Select.ALL:
            rows = rows[self._is_prefill(rows) == (select is Select.PREFILLS)]
        if not len(rows) or not plan.budget:
            return
        num_done = 0
        if not state.drafted:
            # numpy looks up by 64-bit numbers several times as fast
            places = rows.astype(np.int64)
            computed = state.num_computed[places]
            wanted = state.lengths(places) - computed
            counts = self._within_budget(rows, wanted, plan.budget)
            num_done = self._give_slots(plan, rows[: len(counts)], counts, computed)
            plan.add_rows(rows[:num_done], counts[:num_done])
            if num_done == len(counts):
                return
        self._go_on_carefully(plan, rows[num_done:])

    def _is_prefill(self, rows: Int32Array) -> np.ndarray:
        state = self._live.rows
        computed = state.num_computed[rows]
        prefill: np.ndarray = (computed < state.num_prompt[rows]) | (
            state.num_tokens[rows] - computed > 1
        )
        return prefill

    # ------------------------------------------------------------------ columns

    def _within_budget(self, rows: Int32Array, wanted: Int32Array, budget: int) -> Int32Array:
        """Tokens for the first rows, each at least 1; the last may get fewer than it wants. The
        sequences of one request all get some, or none does."""
        # argmin and argmax cost a fraction of min, max and cumsum where rows are few
        assert wanted[wanted.argmin()] > 0, "a running sequence has nothing to run"
        most = int(wanted[wanted.argmax()])
        if most > self._max_chunk:
            wanted, most = np.minimum(wanted, self._max_chunk), self._max_chunk
        if most * len(wanted) <= budget:
            return wanted
        ends = np.cumsum(wanted)
        if ends[-1] <= budget:
            return wanted
        num_rows = int(np.searchsorted(ends, budget, side="left")) + 1
        counts = wanted[:num_rows].copy()
        counts[-1] -= ends[num_rows - 1] - budget
        return self._whole_requests(rows, wanted, counts, budget)

    def _whole_requests(
        self, rows: Int32Array, wanted: Int32Array, counts: Int32Array, budget: int
    ) -> Int32Array:
        """`counts` for the first rows, changed if they end between two sequences of a request: all
        of them then share what is left, or get nothing if there is not a token for each."""
        first, stop = len(counts) - 1, len(counts)
        request = _request_at(self._live, int(rows[first]))
        while stop < len(rows) and _request_at(self._live, int(rows[stop])) is request:
            stop += 1
        if stop == len(counts):
            return counts
        while first and _request_at(self._live, int(rows[first - 1])) is request:
            first -= 1
        share = (budget - int(counts[:first].sum())) // (stop - first)
        if not share:
            return counts[:first]
        return np.concatenate((counts[:first], np.minimum(wanted[first:stop], share)))

    def _give_slots(
        self, plan: PlanBuilder, rows: Int32Array, counts: Int32Array, computed: Int32Array
    ) -> int:
        """Returns how many of the rows have slots for their tokens: all, or those before the first
        for which no block is left."""
        state = self._live.rows
        ends = computed[: len(rows)] + counts
        if self._num_lookahead_slots:
            ends += self._num_lookahead_slots
        needs_more = ends > state.num_allocated_slots[rows.astype(np.int64)]
        if counts[counts.argmax()] > 1:
            # blocks that a chunk fills can be found from now on, also where no new one is needed
            needs_more |= counts > 1
        for index in needs_more.nonzero()[0].tolist():
            sequence = state.sequences[rows[index]]
            assert sequence is not None
            if not self._allocate(plan, sequence, int(counts[index])):
                return int(index)
        return len(rows)

    def _allocate(self, plan: PlanBuilder, sequence: Sequence, num_tokens: int) -> bool:
        update = self._kv_cache.allocate_slots(sequence, num_tokens, self._num_lookahead_slots)
        if update is None:
            return False
        self._placed(plan, sequence, update)
        return True

    def _placed(self, plan: PlanBuilder, sequence: Sequence, update: TableUpdate) -> None:
        self._live.rows.num_allocated_slots[sequence.row] = (
            update.num_blocks * self._kv_cache.block_size
        )
        if not sequence.has_runner_row:
            plan.add_new_sequence(sequence, self._kv_cache.block_ids(sequence))
        elif not update.is_empty:
            plan.add_block_update(sequence, update)

    # ------------------------------------------------------------------ request by request

    def _go_on_carefully(self, plan: PlanBuilder, rows: Int32Array) -> None:
        """Blocks are short, or there are drafts: the rest of the turn, a request at a time."""
        state = self._live.rows
        requests: dict[str, list[Sequence]] = {}
        for row in rows.tolist():
            sequence = state.sequences[row]
            assert sequence is not None
            requests.setdefault(sequence.request.request_id, []).append(sequence)
        for sequences in requests.values():
            request = sequences[0].request
            if request.status is not RequestStatus.RUNNING:
                continue  # it gave way to one before it
            if plan.budget < len(sequences) or not self._schedule(plan, request, sequences):
                break

    def _schedule(self, plan: PlanBuilder, request: Request, sequences: list[Sequence]) -> bool:
        """All of the request's sequences, or none. False if it came to preempt itself."""
        for num_behind, sequence in zip(range(len(sequences) - 1, -1, -1), sequences, strict=True):
            if plan.is_scheduled(sequence):
                continue
            num_tokens = min(sequence.num_left, self._max_chunk, plan.budget - num_behind)
            drafts = sequence.spec_token_ids[: plan.budget - num_behind - num_tokens]
            sequence.spec_token_ids = []
            # what is not known yet is a bet (drafts, tokens in flight): nobody is preempted for it
            if not (drafts and self._allocate(plan, sequence, num_tokens + len(drafts))):
                drafts = []
                if sequence.is_ahead:
                    if not self._allocate(plan, sequence, num_tokens):
                        continue
                elif not self._make_room(plan, request, sequence, num_tokens):
                    return False
            plan.add(sequence, num_tokens + len(drafts), drafts)
        return True

    def _make_room(
        self, plan: PlanBuilder, request: Request, sequence: Sequence, num_tokens: int
    ) -> bool:
        """Preempts until there is room; False if that came to the request itself."""
        while not self._allocate(plan, sequence, num_tokens):
            victim = self._policy.victim(self._live.running, request)
            needed = f"request {request.request_id!r} needed a KV block"
            free = f"{self._kv_cache.num_blocks_free} of {self._kv_cache.num_blocks} were free"
            self._preemptor.preempt(victim, plan, f"{needed}, {free}")
            if victim is request:
                return False
        return True


def _request_at(live: RequestPool, row: int) -> Request:
    """Whose row this is."""
    sequence = live.rows.sequences[row]
    assert sequence is not None
    return sequence.request
