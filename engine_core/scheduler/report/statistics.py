"""The scheduler's part of EngineStatistics, and the check that its parts agree with each other."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from engine_core.scheduler.counters import Counters
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.request_pool import RequestPool

_COUNTERS = [field.name for field in dataclasses.fields(Counters)]


class PoolStatistics(SchedulerPart):
    """Counters, and numbers of this moment."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool

    def statistics(self) -> Mapping[str, Any]:
        pool, kv_cache = self._pool, self._pool.kv_cache
        running = [seq for request in pool.running.values() for seq in request.unfinished]
        # in order of arrival: the first that waits has done so for the longest time
        waiting_since = (
            request.arrival_time
            for request_id, request in pool.by_id.items()
            if request_id not in pool.running and request_id not in pool.compiling
        )
        return dict(
            **{name: copy(getattr(pool.counters, name)) for name in _COUNTERS},
            num_running=len(pool.running),
            num_waiting=pool.num_waiting,
            num_running_by_adapter=_by_adapter(pool.running.values()),
            num_waiting_by_adapter=dict(+pool.num_queued_by_adapter),
            num_swapped=pool.num_swapped,
            num_queued_tokens=pool.num_queued_tokens,
            max_wait_s=max(0.0, pool.now - next(waiting_since, pool.now)),
            num_blocks=kv_cache.num_blocks,
            num_blocks_in_use=kv_cache.num_blocks_in_use,
            num_blocks_cached=kv_cache.num_blocks_cached,
            num_blocks_shared=kv_cache.num_shared_references,
            num_slots_wasted=kv_cache.num_wasted_slots(running),
            block_size=kv_cache.block_size,
            num_host_blocks=kv_cache.host.num_blocks,
            num_host_blocks_in_use=kv_cache.host.num_pinned,
            num_host_blocks_cached=kv_cache.host.num_cached,
            num_disk_blocks=kv_cache.num_disk_blocks,
            num_deduplicated_blocks=kv_cache.num_deduplicated_blocks,
            service_by_tenant=pool.policy.service_by_tenant(),
        )

    def check(self) -> None:
        """Assert that each request is in one queue and counted, with rows and blocks if it runs."""
        pool = self._pool
        waiting = [*pool.waiting, *pool.compiling.values()]
        names = [request.request_id for request in waiting] + list(pool.running)
        assert sorted(names) == sorted(pool.by_id)
        assert len(pool.waiting) + len(pool.compiling) == len(waiting)
        pool.batch.check()
        for request in waiting:
            assert not request.is_finished
            assert request.status is not RequestStatus.RUNNING
            assert all(sequence.row is None for sequence in request.sequences)
        in_rows = []
        for request in pool.running.values():
            assert request.status is RequestStatus.RUNNING
            assert 0 < len(request.unfinished) <= request.num_sequences
            placed = [sequence for sequence in request.unfinished if sequence.row is not None]
            assert placed, f"{request} runs and has no row"
            in_rows += placed
            for sequence in request.sequences:
                assert sequence.request is request
                assert not (sequence.status.is_finished and sequence.row is not None)
        order = pool.batch.order.tolist()
        assert [pool.sequences[row] for row in order] == in_rows, "rows are in order of admission"
        assert [sequence.row for sequence in in_rows] == order
        assert sum(sequence is not None for sequence in pool.sequences) == len(order)
        assert pool.num_reserved_rows <= pool.batch.max_num_rows
        assert pool.num_reserved_rows == sum(
            request.num_running_sequences for request in pool.running.values()
        )
        swapped = [request for request in waiting if request.status is RequestStatus.SWAPPED]
        assert waiting[: len(swapped)] == swapped, "swapped requests stand in front"
        assert pool.num_swapped == len(swapped)
        assert +pool.num_queued_by_adapter == Counter(_by_adapter(waiting))
        assert pool.num_by_tenant == Counter(each.tenant_name for each in pool.by_id.values())
        assert pool.num_queued_tokens == sum(
            sequence.num_tokens for request in waiting for sequence in request.unfinished
        )
        pool.kv_cache.check(in_rows)


def _by_adapter(requests: Iterable[Request]) -> dict[str, int]:
    """Number of requests of each adapter, by fingerprint."""
    return dict(Counter(each.adapter for each in requests if each.adapter is not None))
