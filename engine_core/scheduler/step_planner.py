"""Decides who runs in a step and how much: running requests in order, then waiting ones.

Owns the order of these decisions. Must not know results, clients or stop rules.
"""

from engine_core.kv_cache import AllocStatus, BlockIds, CacheHit, KVCacheManager
from engine_core.scheduler.live_requests import LiveRequests
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus


class StepPlanner:
    """
    Args:
        max_num_seqs: most requests running at once.
        max_chunk: most tokens of one request in a step, drafts aside.
    """

    def __init__(
        self, live: LiveRequests, kv_cache: KVCacheManager, *, max_num_seqs: int, max_chunk: int
    ) -> None:
        self._live = live
        self._kv_cache = kv_cache
        self._max_num_seqs = max_num_seqs
        self._max_chunk = max_chunk

    def fill(self, plan: PlanBuilder) -> None:
        """Spend the plan's budget. Nobody is admitted in a step that preempted."""
        prefilling = self._schedule_running(plan)
        if not plan.has_preempted and plan.budget and not self._live.waiting.is_empty:
            self._admit_waiting(plan, prefilling)

    # ------------------------------------------------------------------ running

    def _schedule_running(self, plan: PlanBuilder) -> list[Request]:
        """Returns the requests whose tokens are not all computed after this step."""
        prefilling: list[Request] = []
        for request in list(self._live.running.values()):
            # whoever was preempted was the newest, and so was everybody behind
            if not plan.budget or request.status is not RequestStatus.RUNNING:
                break
            num_left = request.num_tokens - request.num_computed_tokens
            assert num_left > 0, f"{request} has nothing to run"
            num_tokens = min(num_left, self._max_chunk, plan.budget)
            drafts: list[int] = []
            new_blocks = None
            if request.spec_token_ids:
                drafts = request.spec_token_ids[: plan.budget - 1]
                request.spec_token_ids = []
                new_blocks = self._kv_cache.allocate_slots(request, num_tokens + len(drafts))
            if new_blocks is None:
                # drafts are a bet: nobody is preempted for them
                drafts = []
                new_blocks = self._allocate_or_preempt(request, num_tokens, plan)
            if new_blocks is None:
                break
            plan.add_running(request, num_tokens + len(drafts), new_blocks, drafts)
            if num_tokens < num_left:
                prefilling.append(request)
        return prefilling

    def _allocate_or_preempt(
        self, request: Request, num_tokens: int, plan: PlanBuilder
    ) -> BlockIds | None:
        """Preempts the newest until there is room; None if that came to the request itself."""
        new_blocks = self._kv_cache.allocate_slots(request, num_tokens)
        while new_blocks is None:
            victim = self._live.preempt_newest()
            plan.add_preempted(victim)
            if victim is request:
                return None
            new_blocks = self._kv_cache.allocate_slots(request, num_tokens)
        return new_blocks

    # ------------------------------------------------------------------ waiting

    def _admit_waiting(self, plan: PlanBuilder, prefilling: list[Request]) -> None:
        """Stops at the first request that has no room: nobody overtakes it."""
        live = self._live
        num_promised = sum(self._num_promised(request) for request in prefilling)
        while plan.budget and not live.waiting.is_empty and len(live.running) < self._max_num_seqs:
            request = live.waiting.peek_request()
            hit = self._kv_cache.find_cached_prefix(request)
            status = self._kv_cache.can_admit(
                request,
                hit,
                max_chunk=self._max_chunk,
                num_promised=num_promised if live.running else None,
            )
            if status is AllocStatus.LATER:
                break
            if status is AllocStatus.NEVER:
                live.end(request, RequestStatus.FINISHED_IGNORED, self.why_never(request))
                continue
            self._admit(request, hit, plan)
            if request.num_computed_tokens < request.num_tokens:
                num_promised += self._num_promised(request)

    def _admit(self, request: Request, hit: CacheHit, plan: PlanBuilder) -> None:
        """The head of the waiting queue, with what the cache has of it."""
        self._kv_cache.adopt(request, hit)
        request.num_computed_tokens = hit.num_tokens
        num_tokens = min(request.num_tokens - hit.num_tokens, self._max_chunk, plan.budget)
        new_blocks = self._kv_cache.allocate_slots(request, num_tokens)
        assert new_blocks is not None, "can_admit promised room"
        block_ids = self._kv_cache.block_ids(request)
        if request.status is RequestStatus.PREEMPTED:
            plan.add_resumed(request, num_tokens, block_ids)
        else:
            request.num_cached_tokens = min(hit.num_tokens, request.num_prompt_tokens)
            self._live.counters.num_prompt_tokens += request.num_prompt_tokens
            self._live.counters.num_cached_prompt_tokens += request.num_cached_tokens
            plan.add_new(request, num_tokens, block_ids)
        self._live.admit_head()

    def _num_promised(self, request: Request) -> int:
        return self._kv_cache.num_promised_blocks(request, self._max_chunk)

    # ------------------------------------------------------------------ what can never run

    def why_never(self, request: Request) -> str | None:
        """Why the request cannot run even alone, or None if it can."""
        num_needed = self._kv_cache.num_peak_blocks(request, self._max_chunk)
        if num_needed <= self._kv_cache.num_blocks:
            return None
        what = "prompt and output have" if request.num_output_tokens else "prompt has"
        return (
            f"{what} {request.num_tokens} tokens and need {num_needed} KV blocks of "
            f"{self._kv_cache.block_size} tokens, the cache has {self._kv_cache.num_blocks}; "
            "shorten the prompt or raise --num-blocks"
        )
