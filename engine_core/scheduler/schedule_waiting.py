"""The waiting requests' turn in a step: the head is admitted while everything that it needs lasts.

Owns the order of these questions and what is noted of the answer. Must not know the policy behind
the queue's order, or who runs already.
"""

from engine_core.kv_cache import AllocStatus, CacheHit, KVCacheManager
from engine_core.scheduler.block_needs import BlockNeeds, why_never
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.explanations import Explanations
from engine_core.scheduler.partial_prefills import PartialPrefills
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence
from protocol.explanations import CacheLookup, WaitReason

_MAX_SKIPPED = 64
"""Most requests that others may pass in one step: the step stays flat in the queue's length."""


class WaitingScheduler:
    """Admits from the head of the waiting queue. Only who waits for an adapter, or a long prompt
    for its turn, is passed by others; else the first one without room ends the turn."""

    def __init__(
        self,
        live: RequestPool,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        explanations: Explanations,
        config: SchedulerConfig,
    ) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._policy = policy
        self._partial = PartialPrefills(live, config)
        self._explanations = explanations
        self._config = config
        self._needs = BlockNeeds(live, kv_cache, config)
        self._num_promised = 0
        """Blocks that running requests will still take, in the step at hand."""

    def fill(
        self, plan: PlanBuilder, *, only_swapped: bool = False, whole_prompts: bool = False
    ) -> None:
        """Spend what is left of the plan's budget on the waiting requests.

        Args:
            only_swapped: admit nobody who is not swapped.
            whole_prompts: a prompt is cut only if it is longer than a whole step.
        """
        live = self._live
        if live.waiting.is_empty:
            return
        self._partial.count(plan)
        self._num_promised = self._needs.of_running()
        skipped: list[Request] = []
        while not live.waiting.is_empty and len(skipped) < _MAX_SKIPPED:
            request = live.waiting.peek_request()
            if only_swapped and request.status is not RequestStatus.SWAPPED:
                self._note(request, WaitReason.DECODES, "this step is for decoding")
                break
            if plan.budget <= 0:
                self._note(request, WaitReason.TOKEN_BUDGET, "the step's tokens are given out")
                break
            if (why := self._why_skip(request)) is not None:
                skipped.append(live.waiting.pop_request())
                self._explanations.skipped(request, *why)
                continue
            if not self._admit(request, plan, whole_prompts):
                break
        if len(skipped) == _MAX_SKIPPED:
            limit = f"{_MAX_SKIPPED} requests were passed in this step, no more are"
            self._explanations.stopped_at(None, WaitReason.QUEUE, limit)
        for request in reversed(skipped):
            live.waiting.prepend_request(request)

    def _note(self, request: Request, reason: WaitReason, why: str) -> None:
        self._explanations.stopped_at(request, reason, why)

    # ------------------------------------------------------------------ may it?

    def _why_skip(self, request: Request) -> tuple[WaitReason, str] | None:
        limit = self._config.max_num_adapters
        if limit is not None and request.adapter is not None:
            in_use = {other.adapter for other in self._live.running.values()} - {None}
            if request.adapter not in in_use and len(in_use) >= limit:
                return (
                    WaitReason.ADAPTERS,
                    f"the adapters in use are {len(in_use)}, the limit is {limit}",
                )
        if (why := self._partial.why_skip(request)) is not None:
            return WaitReason.PARTIAL_PREFILLS, why
        return None

    def _admit(self, request: Request, plan: PlanBuilder, whole_prompts: bool) -> bool:
        """Whether the turn goes on: the request was admitted, or is over."""
        num_seqs = self._live.num_reserved_rows + request.get_max_num_running_seqs()
        if num_seqs > self._config.max_num_seqs:
            why = f"{num_seqs} sequences would run, the limit is {self._config.max_num_seqs}"
            self._note(request, WaitReason.SEQUENCES, why)
            return False
        if request.status is RequestStatus.SWAPPED:
            return self._admit_swapped(request, plan)
        first = request.unfinished[0]
        hit = self._kv_cache.find_cached_prefix(first)
        num_left = first.num_tokens - hit.num_tokens
        num_tokens = min(num_left, self._config.max_chunk, plan.budget)
        is_cut = num_tokens < min(num_left, self._config.max_chunk)
        if is_cut and whole_prompts and not plan.is_empty:
            why = f"{num_left} tokens are to be computed, {plan.budget} are left in this step"
            self._note(request, WaitReason.TOKEN_BUDGET, why)
            return False
        if num_tokens < num_left and (why_not := self._partial.why_wait()) is not None:
            self._note(request, WaitReason.PARTIAL_PREFILLS, why_not)
            return False
        status = self._kv_cache.can_admit(
            first,
            hit,
            max_chunk=self._config.max_chunk,
            num_reserved_blocks=self._num_promised,
            is_alone=not self._live.running,
            is_resumed=request.status is RequestStatus.PREEMPTED,
            num_lookahead_slots=self._config.num_lookahead_slots,
            num_extra_blocks=self._needs.of_branches(request),
        )
        if self._has_room(request, status):
            self._start(request, first, hit, num_tokens, plan)
        return status is not AllocStatus.LATER

    def _has_room(self, request: Request, status: AllocStatus) -> bool:
        """Ends a request that can never run."""
        if status is AllocStatus.NEVER:
            why = why_never(request, self._kv_cache, self._config) or (
                f"its {request.get_max_num_running_seqs()} sequences have "
                f"{request.num_queued_tokens} tokens and do not fit in the cache's "
                f"{self._kv_cache.num_blocks} KV blocks together; ask for fewer or raise "
                "--num-blocks"
            )
            self._live.end(request, RequestStatus.FINISHED_IGNORED, why)
        elif status is AllocStatus.LATER:
            num_free, num_blocks = self._kv_cache.num_blocks_free, self._kv_cache.num_blocks
            why = (
                f"its {request.num_queued_tokens} tokens need KV blocks; {num_free} of {num_blocks}"
                f" are free, {self._num_promised} of them promised to running requests and "
                f"{self._kv_cache.watermark_blocks} kept as head-room"
            )
            self._note(request, WaitReason.BLOCKS, why)
        return status is AllocStatus.OK

    # ------------------------------------------------------------------ it may

    def _start(
        self, request: Request, first: Sequence, hit: CacheHit, num_tokens: int, plan: PlanBuilder
    ) -> None:
        """With what the cache has of it. Its other sequences branch off later."""
        kv_cache, live = self._kv_cache, self._live
        if request.status is RequestStatus.WAITING:
            self._note_lookup(request, first, hit)
        kv_cache.allocate_cached(first, hit)
        live.admit_head()
        live.place(first)
        first.num_computed_tokens = hit.num_tokens
        update = kv_cache.allocate_slots(first, num_tokens, self._config.num_lookahead_slots)
        assert update is not None, "can_admit promised room"
        live.rows.num_allocated_slots[first.row] = update.num_blocks * kv_cache.block_size
        plan.add_new_sequence(first, kv_cache.block_ids(first))
        plan.add(first, num_tokens)
        if hit.num_tokens + num_tokens < first.num_tokens:
            self._num_promised += self._needs.of_sequence(first)
            self._partial.started(request)
        self._num_promised += self._needs.of_branches(request)

    def _note_lookup(self, request: Request, first: Sequence, hit: CacheHit) -> None:
        counters = self._live.counters
        request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
        request.cache_lookup = CacheLookup(
            num_tokens=request.num_cached_tokens,
            num_host_tokens=hit.num_host_tokens,
            ended=self._kv_cache.explain_lookup(first, hit),
        )
        counters.num_prompt_tokens += request.num_prompt_tokens
        counters.num_cached_prompt_tokens += request.num_cached_tokens
        counters.num_host_cached_prompt_tokens += hit.num_host_tokens
        self._policy.admitted(request, request.num_prompt_tokens - request.num_cached_tokens)

    def _admit_swapped(self, request: Request, plan: PlanBuilder) -> bool:
        """All its sequences come back at once."""
        sequences = request.unfinished
        if plan.budget < len(sequences):
            why = f"its {len(sequences)} sequences need a token each, {plan.budget} are left"
            self._note(request, WaitReason.TOKEN_BUDGET, why)
            return False
        status = self._kv_cache.can_swap_in(
            sequences,
            num_reserved_blocks=self._num_promised,
            is_alone=not self._live.running,
            num_lookahead_slots=self._config.num_lookahead_slots + 1,
        )
        if not self._has_room(request, status):
            return status is AllocStatus.NEVER
        self._kv_cache.swap_in(sequences)
        self._live.admit_head()
        num_behind = len(sequences)
        for sequence in sequences:
            num_behind -= 1
            self._live.place(sequence)
            num_left = sequence.num_tokens - sequence.num_computed_tokens
            num_tokens = min(num_left, self._config.max_chunk, plan.budget - num_behind)
            update = self._kv_cache.allocate_slots(
                sequence, num_tokens, self._config.num_lookahead_slots
            )
            self._live.rows.num_allocated_slots[sequence.row] = self._kv_cache.num_allocated_slots(
                sequence
            )
            plan.add_new_sequence(sequence, self._kv_cache.block_ids(sequence))
            if update is not None:  # else it runs from the next step on
                plan.add(sequence, num_tokens)
        self._live.allow_async(request)
        return True
