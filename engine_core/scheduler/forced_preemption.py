"""Room for a more urgent request in place of running ones (policy priority): whom the policy ranks
behind the head of the queue gives way if that helps."""

import bisect

import numpy as np

from engine_core.kv_cache import AllocStatus, BlockCounts, CacheHit
from engine_core.scheduler.batch_state import Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.preemption import PreemptionMode, Preemptor
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.rules.adapters import AdapterSlots
from engine_core.scheduler.rules.partial_prefills import PartialPrefills
from engine_core.scheduler.schedule_waiting import WaitingScheduler
from protocol.explanations import PreemptionCause

_STEPS_BETWEEN_SEARCHES = 16
"""Most steps after which victims for the same head are looked for again."""


class ForcedPreemption:
    """Victims are recomputed, behind the request that takes their place."""

    def __init__(
        self,
        pool: RequestPool,
        preemptor: Preemptor,
        waiting: WaitingScheduler,
        adapters: AdapterSlots,
        partial: PartialPrefills,
        config: SchedulerConfig,
    ) -> None:
        self._pool = pool
        self._kv_cache = pool.kv_cache
        self._preemptor = preemptor
        self._waiting = waiting
        self._adapters = adapters
        self._partial = partial
        self._max_num_seqs = config.max_num_seqs
        self._max_chunk = config.max_chunk
        self._num_lookahead_slots = config.num_lookahead_slots
        self._without_victims: tuple[Request, int, int] | None = None
        """The head of the queue, and version and interval of the batch, if no victims help."""

    def preempt(self, plan: PlanBuilder) -> None:
        """Preempt victims for the head of the queue; the plan must still be empty."""
        if self._pool.waits_in_groups or self._waiting.starts_no_new:
            return
        victims = self._select_victims(plan)
        if not victims:
            return
        head = self._pool.waiting.peek_request()
        why = f"request {head.request_id!r} of priority {head.message.priority} is more urgent"
        for victim in victims:
            self._preemptor.preempt(
                victim, plan, PreemptionCause.PRIORITY, why, PreemptionMode.RECOMPUTE
            )
        self._pool.counters.num_preemptions_forced += len(victims)

    def _select_victims(self, plan: PlanBuilder) -> list[Request]:
        """The fewest running requests, the least urgent first, in whose place the head of the queue
        can start in the next step. None if it has a place beside them, or not even in that of all
        that the policy names."""
        pool = self._pool
        # the others seldom shrink before a row changes its owner: no search in every step
        beside = pool.batch.version, plan.step_id // _STEPS_BETWEEN_SEARCHES
        if self._without_victims is not None and pool.waiting:
            if self._without_victims == (pool.waiting.peek_request(), *beside):
                return []
            self._without_victims = None
        outranked = pool.policy.select_forced_victims(pool.running)
        if not outranked:
            return []
        head = pool.waiting.peek_request()
        hit = self._waiting.find_cached_prefix(head)
        if self._has_place(head, hit, []):
            return []
        if not self._has_place(head, hit, outranked):
            self._without_victims = (head, *beside)
            return []

        def can_start(victims: list[Request]) -> bool:
            has_place = self._has_place(head, hit, victims)
            return has_place and self._has_tokens(head, hit, victims, plan)

        choices = [outranked[:count] for count in range(1, len(outranked) + 1)]
        place = bisect.bisect_left(choices, True, key=can_start)
        return choices[place] if place < len(choices) else []

    def _has_place(self, request: Request, hit: CacheHit, victims: list[Request]) -> bool:
        """Whether there are rows, an adapter and blocks for it in this step; or in the next one if
        these victims give way now."""
        gone = set(victims)
        others = [other for other in self._pool.running.values() if other not in gone]
        num_seqs = sum(other.num_running_sequences for other in (request, *others))
        if num_seqs > self._max_num_seqs or self._adapters.lacks(request, others):
            return False
        num_slots = self._num_lookahead_slots + bool(victims)
        head_room = self._blocks_soon(self._rows_without(victims), num_slots)
        head_room = sum(map(self._waiting.blocks_of_forks, others), start=head_room)
        head_room = head_room + (self._kv_cache.watermark_blocks if others else 0)
        freed = [sequence for victim in victims for sequence in victim.unfinished]
        head_room = head_room - self._kv_cache.num_freed_blocks(freed, hit)
        return self._waiting.ask_cache(request, hit, head_room) is AllocStatus.OK

    def _has_tokens(
        self, request: Request, hit: CacheHit, victims: list[Request], plan: PlanBuilder
    ) -> bool:
        """Whether the next step will have tokens for it, and for its prompt in part if need be."""
        batch, rows = self._pool.batch, self._rows_without(victims)
        num_uncomputed = batch.lengths(rows) - batch.num_computed_tokens[rows]
        num_left = plan.budget - int(np.minimum(num_uncomputed, self._max_chunk).sum())
        self._partial.count(plan, rows)
        if num_left <= 0 or self._partial.why_wait(request) is not None:
            return False
        num_wanted = request.unfinished[0].num_tokens - hit.num_tokens
        is_cut = num_wanted > min(num_left, self._max_chunk)
        return not is_cut or self._partial.why_not_in_part() is None

    def _rows_without(self, victims: list[Request]) -> Int64Array:
        order = self._pool.batch.order
        gone = [seq.row for victim in victims for seq in victim.unfinished if seq.row is not None]
        return order[~np.isin(order, gone)]

    def _blocks_soon(self, rows: Int64Array, num_slots: int) -> BlockCounts:
        """Blocks that these sequences will take for all tokens known now and that many slots."""
        batch, kv_cache = self._pool.batch, self._kv_cache
        lengths = batch.lengths(rows)
        is_short = lengths + num_slots > batch.num_allocated_slots[rows]
        num_blocks: BlockCounts = 0
        for row, length in zip(rows[is_short].tolist(), lengths[is_short].tolist(), strict=True):
            sequence = self._pool.sequence_in(row)
            chunk = min(self._max_chunk, length - sequence.num_computed_tokens) + num_slots
            num_extra = length - sequence.num_tokens + num_slots
            num_blocks = num_blocks + kv_cache.num_reserved_blocks(sequence, chunk, num_extra)
        return num_blocks
