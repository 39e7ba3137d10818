"""May this request start? The head of the waiting queue is admitted while everything that it needs
lasts: rows, tokens of the step, KV blocks."""

from typing import NamedTuple

import numpy as np

from engine_core.kv_cache import AllocStatus, BlockCounts, CacheHit, exceeds
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.outputs import NO_CLIENT
from engine_core.scheduler.part import SchedulerParts, Why
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.rules.encoder_inputs import EncoderInputRule, EncoderWork
from protocol.explanations import CacheLookup, LookupEnd, WaitReason

_MAX_SKIPPED = 64
"""Most requests skipped in one step, so that a step's cost does not grow with the queue."""
_MAX_SKIPPED_FOR_ADAPTERS = 1024
"""Most requests skipped for their adapters: a crowd for one is no reason to hold up others."""


class _Start(NamedTuple):
    """A request's first sequence, what of it is cached, and what it computes in this step."""

    first: Sequence
    hit: CacheHit
    work: EncoderWork


class WaitingScheduler:
    """Requests that wait for an adapter or a state, and long prompts beyond their limit, are
    skipped; any other that does not fit ends the search."""

    def __init__(
        self,
        pool: RequestPool,
        explanations: Explanations,
        config: SchedulerConfig,
        parts: SchedulerParts,
        encoder: EncoderInputRule,
    ) -> None:
        self._pool = pool
        self._kv_cache = pool.kv_cache
        self._parts = parts
        self._encoder = encoder
        self._explanations = explanations
        self._config = config
        self._max_chunk = config.max_chunk
        self._num_lookahead_slots = config.num_lookahead_slots
        self.starts_no_new = False
        """Only requests that were started before may run."""
        self._num_reserved_blocks: BlockCounts = 0
        """Blocks that running requests will still take, in the step at hand."""

    def schedule(
        self, plan: PlanBuilder, *, only_swapped: bool = False, whole_prompts: bool = False
    ) -> None:
        """Spend what is left of the plan's budget on the waiting requests.

        Args:
            only_swapped: admit swapped requests only.
            whole_prompts: a prompt is cut only if it is longer than a whole step.
        """
        waiting = self._pool.waiting
        if not waiting:
            return
        if plan.has_preempted:
            why = "a request was preempted in this step"
            self._explanations.stopped_at(None, WaitReason.PREEMPTION, why)
            return
        for begin_pass in self._parts.begin_pass:
            begin_pass(plan)
        self._num_reserved_blocks = self._blocks_of_running()
        skipped: list[Request] = []
        num_left, num_left_for_adapters = _MAX_SKIPPED, _MAX_SKIPPED_FOR_ADAPTERS
        while waiting and num_left and num_left_for_adapters:
            request = waiting.peek_request()
            if only_swapped and request.status is not RequestStatus.SWAPPED:
                self._stop_at(request, WaitReason.DECODES, "this step is for decoding")
                break
            if plan.budget <= 0:
                self._stop_at(request, WaitReason.TOKEN_BUDGET, "the step's tokens are given out")
                break
            running = next(iter(self._pool.running.values()), None)
            if running is not None and (request.runs_alone or running.runs_alone):
                why = f"request {running.request_id!r} runs, and one of both must run alone"
                self._stop_at(request, WaitReason.ALONE, why)
                break
            if (why_skip := self._why_skip(request)) is not None:
                skipped.append(waiting.pop_request())
                self._explanations.skipped(request, *why_skip)
                if why_skip[0] in (WaitReason.ADAPTERS, WaitReason.ADAPTER_LOADING):
                    num_left_for_adapters -= 1
                else:
                    num_left -= 1
                continue
            num_left_to_compute = 0
            found = self._may_start(request, plan, whole_prompts)
            if isinstance(found, _Start):
                num_left_to_compute = self._start(request, found, plan)
            elif found is None:
                skipped.append(waiting.pop_request())
                num_left -= 1
            elif not found:
                break
            if request.status is RequestStatus.RUNNING:
                for on_admitted in self._parts.on_admitted:
                    on_admitted(request, num_left_to_compute, skipped)
        if not (num_left and num_left_for_adapters):
            limit = f"{len(skipped)} requests were passed in this step, no more are"
            self._explanations.stopped_at(None, WaitReason.QUEUE, limit)
        for request in reversed(skipped):
            waiting.prepend_request(request)

    def _stop_at(self, request: Request, reason: WaitReason, why: str) -> bool:
        self._explanations.stopped_at(request, reason, why)
        return False

    # ------------------------------------------------------------------ may it start?

    def _why_skip(self, request: Request) -> Why | None:
        is_own = request.client_index == NO_CLIENT
        is_new = request.status is RequestStatus.WAITING and not request.message.is_resumed
        if self.starts_no_new and is_new and not is_own:
            return WaitReason.PAUSED, "the engine pauses when those that have started have ended"
        if request.report is not None:
            num_others = sum(each.num_reported_values for each in self._pool.running.values())
            if (why := request.report.why_wait(num_others)) is not None:
                return why
        for why_wait in self._parts.why_wait:
            if (why := why_wait(request)) is not None:
                return why
        return None

    def _may_start(
        self, request: Request, plan: PlanBuilder, whole_prompts: bool
    ) -> _Start | bool | None:
        """How it starts; else whether the next one may be tried: this one came back from the host,
        or can never run. None: it is to be skipped."""
        num_seqs = self._pool.num_reserved_rows + request.num_running_sequences
        if num_seqs > self._config.max_num_seqs:
            why = f"{num_seqs} sequences would run, the limit is {self._config.max_num_seqs}"
            return self._stop_at(request, WaitReason.SEQUENCES, why)
        if request.status is RequestStatus.SWAPPED:
            return self._try_swap_in(request, plan)
        first = request.unfinished[0]
        if self._kv_cache.still_lacks_blocks(first, self._head_room()):
            return self._has_room(request, AllocStatus.LATER)
        hit = self.find_cached_prefix(request)
        num_left = first.num_tokens - hit.num_tokens
        num_tokens = min(num_left, self._max_chunk, plan.budget)
        is_cut = num_tokens < min(num_left, self._max_chunk)
        if is_cut and whole_prompts and not plan.is_empty:
            why = f"{num_left} tokens are to be computed, {plan.budget} are left in this step"
            return self._stop_at(request, WaitReason.TOKEN_BUDGET, why)
        for limit_start in () if whole_prompts else self._parts.limit_start:
            num_tokens = limit_start(plan, num_tokens)
        work = self._encoder.find_work(first, hit.num_tokens, num_tokens)
        if not (num_tokens := work.num_tokens):
            return self._stop_at(request, WaitReason.ENCODER, work.why_fewer or "")
        is_in_order = num_tokens > 1 and self._config.computes_in_order
        if not is_in_order and self._kv_cache.starts_in_this_step(hit):
            why = "the state that it starts from is computed in this step"
            self._explanations.skipped(request, WaitReason.STATE, why)
            return None
        if num_tokens < num_left:
            for why_not_in_part in self._parts.why_not_in_part:
                if (why_not := why_not_in_part()) is not None:
                    return self._stop_at(request, *why_not)
        status = self.ask_cache(request, hit, self._head_room())
        if self._has_room(request, status):
            if num_blocks := self._kv_cache.stage(hit):
                why = f"{num_blocks} blocks of its prompt are being read from disk"
                return self._stop_at(request, WaitReason.DISK, why)
            return _Start(first, hit, work)
        return status is not AllocStatus.LATER

    def find_cached_prefix(self, request: Request) -> CacheHit:
        """The part of the request's first sequence that is cached, and need not be computed."""
        if request.computes_whole_prompt:
            return self._kv_cache.no_hit
        return self._kv_cache.find_cached_prefix(request.unfinished[0])

    def ask_cache(self, request: Request, hit: CacheHit, head_room: BlockCounts) -> AllocStatus:
        """Whether there are blocks for it beside `head_room` others."""
        return self._kv_cache.can_admit(
            request.unfinished[0],
            hit,
            max_chunk=self._max_chunk,
            head_room=head_room,
            is_resumed=request.status is RequestStatus.PREEMPTED,
            num_lookahead_slots=self._num_lookahead_slots,
            num_extra_blocks=self.blocks_of_forks(request),
        )

    def _has_room(self, request: Request, status: AllocStatus) -> bool:
        """Ends a request that can never run."""
        if status is AllocStatus.NEVER:
            why = self.why_never(request) or (
                f"its {request.num_running_sequences} sequences have {request.num_queued_tokens} "
                f"tokens and do not fit in the cache's {self._kv_cache.num_blocks} KV blocks "
                "together; ask for fewer or raise --num-blocks"
            )
            self._pool.finish_request(request, RequestStatus.FINISHED_IGNORED, why)
        elif status is AllocStatus.LATER:
            num_free, num_blocks = self._kv_cache.num_blocks_free, self._kv_cache.num_blocks
            why = (
                f"its {request.num_queued_tokens} tokens need KV blocks; {num_free} of {num_blocks}"
                f" are free, {self._num_reserved_blocks} of them reserved for running requests and "
                f"{self._kv_cache.watermark_blocks} kept as head-room"
            )
            self._stop_at(request, WaitReason.BLOCKS, why)
        return status is AllocStatus.OK

    def why_never(self, request: Request) -> str | None:
        """Why the request cannot run even alone, or None if it can."""
        for limit, option in (
            (self._config.max_num_seqs, "--max-num-seqs"),
            (self._config.max_num_batched_tokens, "--max-num-batched-tokens"),
            (self._config.max_num_shared_tokens, "--max-num-shared-tokens"),
        ):
            if limit is not None and request.num_sequences > limit:
                return (
                    f"num_sequences is {request.num_sequences}, the limit is {limit} ({option}); "
                    "ask for fewer or raise it"
                )
        kv_cache = self._kv_cache
        num_slots = self._num_lookahead_slots
        num_needed = kv_cache.num_peak_blocks(request.num_tokens, self._max_chunk, num_slots)
        num_needed = num_needed + kv_cache.num_tails(request.num_sequences - 1)
        num_needed = num_needed + kv_cache.num_encoder_blocks(request.content.num_encoder_tokens)
        is_new = request.status is RequestStatus.WAITING
        num_kept = kv_cache.watermark_blocks if is_new else 0
        if not exceeds(num_needed, kv_cache.pool_sizes - num_kept):
            return None
        what = "prompt and output have" if request.num_output_tokens else "prompt has"
        return (
            f"{what} {request.num_tokens} tokens and need {num_needed} KV blocks of "
            f"{kv_cache.block_size} tokens, the cache has {kv_cache.pool_sizes} less {num_kept} as "
            "head-room; shorten the prompt or raise --num-blocks"
        )

    # ------------------------------------------------------------------ start it

    def _start(self, request: Request, found: _Start, plan: PlanBuilder) -> int:
        """Start a request behind its cached prefix. Its other sequences fork later. Returns how
        many of its tokens are left for later steps."""
        first, hit, work = found
        kv_cache, pool, num_tokens = self._kv_cache, self._pool, work.num_tokens
        if request.status is RequestStatus.WAITING:
            self._count_lookup(request, first, hit)
        kv_cache.allocate_cached(first, hit)
        pool.admit_head()
        pool.assign_row(first)
        first.num_computed_tokens = hit.num_tokens
        self._encoder.schedule(first, work)
        update = kv_cache.allocate_slots(first, num_tokens, self._num_lookahead_slots)
        assert update is not None, "can_admit found room"
        pool.batch.num_allocated_slots[first.row] = update.num_blocks * kv_cache.block_size
        plan.add_new_sequence(first, kv_cache.block_ids(first))
        plan.add_sequence(first, num_tokens)
        if num_left := first.num_tokens - hit.num_tokens - num_tokens:
            self._num_reserved_blocks = self._num_reserved_blocks + self._blocks_of(first)
        self._num_reserved_blocks = self._num_reserved_blocks + self.blocks_of_forks(request)
        return num_left

    def _count_lookup(self, request: Request, first: Sequence, hit: CacheHit) -> None:
        """Count what the cache had of a request at its first admission."""
        counters, num_prompt = self._pool.counters, request.num_prompt_tokens
        num_cached = request.account.num_cached_tokens = min(hit.num_tokens, num_prompt)
        request.account.cache_lookup = lookup = CacheLookup(
            num_tokens=num_cached,
            num_host_tokens=hit.num_host_tokens,
            num_disk_tokens=hit.num_disk_tokens,
            ended=(
                LookupEnd.WHOLE_PROMPT
                if request.computes_whole_prompt
                else self._kv_cache.explain_lookup(first, hit)
            ),
            num_key_tokens=min(max(hit.num_tokens, hit.num_key_tokens), num_prompt),
        )
        ended = lookup.ended.value
        counters.num_lookups_by_end[ended] += 1
        counters.num_lookup_hits_by_end[ended] += num_cached > 0
        counters.num_prompt_tokens += num_prompt
        counters.num_cached_prompt_tokens += num_cached
        counters.num_host_cached_prompt_tokens += hit.num_host_tokens
        counters.num_disk_cached_prompt_tokens += hit.num_disk_tokens
        self._pool.policy.on_admit(request, num_prompt - num_cached)

    def _try_swap_in(self, request: Request, plan: PlanBuilder) -> bool:
        """All its sequences come back at once."""
        sequences = request.unfinished
        if plan.budget < len(sequences):
            why = f"its {len(sequences)} sequences need a token each, {plan.budget} are left"
            return self._stop_at(request, WaitReason.TOKEN_BUDGET, why)
        status = self._kv_cache.can_swap_in(
            sequences,
            head_room=self._head_room(),
            num_lookahead_slots=self._num_lookahead_slots + 1,
        )
        if not self._has_room(request, status):
            return status is AllocStatus.NEVER
        self._kv_cache.swap_in(sequences)
        self._pool.admit_head()
        num_behind = len(sequences)
        for sequence in sequences:
            num_behind -= 1
            self._pool.assign_row(sequence)
            num_left = sequence.num_tokens - sequence.num_computed_tokens
            num_tokens = min(num_left, self._max_chunk, plan.budget - num_behind)
            num_tokens = self._encoder.limit(sequence, num_tokens)
            update = None
            if num_tokens:
                update = self._kv_cache.allocate_slots(
                    sequence, num_tokens, self._num_lookahead_slots
                )
            num_slots = self._kv_cache.num_allocated_slots(sequence)
            self._pool.batch.num_allocated_slots[sequence.row] = num_slots
            plan.add_new_sequence(sequence, self._kv_cache.block_ids(sequence))
            if update is not None:  # else it runs from the next step on
                plan.add_sequence(sequence, num_tokens)
        self._pool.allow_async(request)
        return True

    # ------------------------------------------------------------------ blocks not taken yet

    def _head_room(self) -> BlockCounts:
        """Blocks to be left free; without running requests no watermark is needed."""
        watermark = self._kv_cache.watermark_blocks if self._pool.running else 0
        return self._num_reserved_blocks + watermark

    def _blocks_of_running(self) -> BlockCounts:
        """Blocks that running requests will still take for the tokens that they have."""
        batch = self._pool.batch
        order = batch.order
        if not len(order):
            return 0
        is_prefill = batch.num_tokens[order] - batch.num_computed_tokens[order] > 1
        num_blocks: BlockCounts = 0
        if np.count_nonzero(is_prefill):
            prefills = order[is_prefill].tolist()
            num_blocks = sum(self._blocks_of(self._pool.sequence_in(row)) for row in prefills)
        if self._pool.num_reserved_rows > len(order):
            forks = map(self.blocks_of_forks, self._pool.running.values())
            num_blocks = sum(forks, start=num_blocks)
        return num_blocks

    def _blocks_of(self, sequence: Sequence) -> BlockCounts:
        return self._kv_cache.num_reserved_blocks(
            sequence, self._max_chunk, self._num_lookahead_slots
        )

    def blocks_of_forks(self, request: Request) -> BlockCounts:
        """Blocks that the sequences without a row will take when they are forked: all but the
        prompt's full blocks, for what they have sampled and one token more."""
        if request.num_sequences == 1:
            return 0
        existing = request.unfinished
        lengths = [seq.num_tokens for seq in existing if seq.row is None]
        if request.status is not RequestStatus.RUNNING:
            lengths = lengths[1:]  # the first is the parent
        lengths += [request.num_prompt_tokens] * (request.num_running_sequences - len(existing))
        num_slots, num_shared = self._num_lookahead_slots + 1, request.num_prompt_tokens
        drops = len(request.sequences) > 1  # something has been sampled
        return sum(
            self._kv_cache.num_own_blocks(
                length, self._max_chunk, num_slots, num_shared, drops=drops
            )
            for length in lengths
        )
