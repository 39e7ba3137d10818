"""The scheduler's numbers at one moment. Counters grow from the start."""

import dataclasses
from typing import TYPE_CHECKING

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.policies.base import SchedulingPolicy
from protocol.outputs import FinishReason

if TYPE_CHECKING:
    from engine_core.scheduler.request_pool import RequestPool


@dataclasses.dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Blocks: total = in use + cached (free, still findable) + empty. Fields are those of the
    wire's EngineStatistics, where what they count is said."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_queued_tokens: int
    max_wait_s: float
    num_blocks: int
    num_blocks_in_use: int
    num_blocks_cached: int
    num_blocks_shared: int
    num_slots_wasted: int
    block_size: int
    num_host_blocks: int
    num_host_blocks_in_use: int
    num_host_blocks_cached: int
    num_deduplicated_blocks: int
    num_steps: int
    """Steps that ran at least one token."""
    num_prompt_tokens: int
    """Of all requests at their first admission, cached ones included."""
    num_cached_prompt_tokens: int
    num_host_cached_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_preemptions_by_swap: int
    num_preemptions_forced: int
    num_refused: int
    num_finished: dict[FinishReason, int]
    service_by_tenant: dict[str, float]


@dataclasses.dataclass(slots=True)
class Counters:
    """What the scheduler counts while it runs."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_host_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_preemptions_by_swap: int = 0
    num_preemptions_forced: int = 0
    num_refused: int = 0
    num_finished: dict[FinishReason, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )


def collect_statistics(
    live: "RequestPool", kv_cache: KVCacheManager, policy: SchedulingPolicy, now: float
) -> SchedulerStatistics:
    """The numbers of this moment; `now` in seconds, on the clock of `arrival_time`."""
    counters = live.counters
    running = [seq for request in live.running.values() for seq in request.unfinished]
    waiting_since = (request.arrival_time for request in live.waiting)
    return SchedulerStatistics(
        num_running=len(live.running),
        num_waiting=len(live.waiting),
        num_swapped=live.num_swapped,
        num_queued_tokens=live.num_queued_tokens,
        max_wait_s=max(0.0, now - min(waiting_since, default=now)),
        num_blocks=kv_cache.num_blocks,
        num_blocks_in_use=kv_cache.num_blocks_in_use,
        num_blocks_cached=kv_cache.num_blocks_cached,
        num_blocks_shared=kv_cache.num_shared_references,
        num_slots_wasted=kv_cache.usage(running).num_wasted_slots,
        block_size=kv_cache.block_size,
        num_host_blocks=kv_cache.num_host_blocks,
        num_host_blocks_in_use=kv_cache.num_host_blocks_in_use,
        num_host_blocks_cached=kv_cache.num_host_blocks_cached,
        num_deduplicated_blocks=kv_cache.num_deduplicated_blocks,
        num_steps=counters.num_steps,
        num_prompt_tokens=counters.num_prompt_tokens,
        num_cached_prompt_tokens=counters.num_cached_prompt_tokens,
        num_host_cached_prompt_tokens=counters.num_host_cached_prompt_tokens,
        num_generated_tokens=counters.num_generated_tokens,
        num_preemptions=counters.num_preemptions,
        num_preemptions_by_swap=counters.num_preemptions_by_swap,
        num_preemptions_forced=counters.num_preemptions_forced,
        num_refused=counters.num_refused,
        num_finished=dict(counters.num_finished),
        service_by_tenant=policy.service_by_tenant(),
    )
