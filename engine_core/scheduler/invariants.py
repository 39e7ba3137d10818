"""What must hold between the scheduler's parts at any time. For tests, and for whoever debugs."""

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus


def check_live(live: RequestPool, kv_cache: KVCacheManager, max_num_seqs: int) -> None:
    """Assert that each request is in one queue, has rows and blocks if it runs, and is counted."""
    waiting = list(live.waiting)
    names = [request.request_id for request in waiting] + list(live.running)
    assert sorted(names) == sorted(live.by_id)
    assert len(live.waiting) == len(waiting)
    live.rows.check()
    for request in waiting:
        assert request.status in (
            RequestStatus.WAITING,
            RequestStatus.PREEMPTED,
            RequestStatus.SWAPPED,
        )
        assert all(sequence.row is None for sequence in request.sequences)
    in_rows = []
    for request in live.running.values():
        assert request.status is RequestStatus.RUNNING
        assert 0 < len(request.unfinished) <= request.num_sequences
        placed = [sequence for sequence in request.unfinished if sequence.row is not None]
        assert placed, f"{request} runs and has no row"
        in_rows += placed
        for sequence in request.sequences:
            assert sequence.request is request
            assert not (sequence.status.is_finished and sequence.row is not None)
    order = [live.rows.sequences[row] for row in live.rows.order.tolist()]
    assert order == in_rows, "rows are in order of admission"
    assert live.num_reserved_rows <= max_num_seqs
    assert live.num_reserved_rows == sum(
        request.get_max_num_running_seqs() for request in live.running.values()
    )
    swapped = [request for request in waiting if request.status is RequestStatus.SWAPPED]
    assert waiting[: len(swapped)] == swapped, "swapped requests stand in front"
    assert live.num_swapped == len(swapped)
    assert live.num_queued_tokens == sum(
        sequence.num_tokens for request in waiting for sequence in request.unfinished
    )
    kv_cache.check(in_rows)
