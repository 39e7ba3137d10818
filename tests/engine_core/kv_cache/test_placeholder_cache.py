"""A model without a KV cache: everything is admitted and no block is allocated."""

from paged_memory import Stream

from engine_core.kv_cache import AllocStatus, KVCacheManager


def test_a_sequence_of_any_length_runs_without_blocks():
    """Proves S131, S176."""
    cache = KVCacheManager(num_blocks=0, block_size=16, groups=())
    stream, child = Stream("a", [1] * 100_000), Stream("b", [1])
    hit = cache.find_cached_prefix(stream)
    status = cache.can_admit(stream, hit, max_chunk=8, head_room=0, is_resumed=False)
    assert status is AllocStatus.OK
    cache.allocate_cached(stream, hit)
    assert cache.allocate_slots(stream, 100_000).is_empty
    assert cache.num_allocated_slots(stream) >= 100_000
    cache.fork(stream, child, 5)
    assert cache.swap_out([stream, child]) == 0
    assert cache.can_swap_in([stream], head_room=0) is AllocStatus.OK
    cache.swap_in([stream, child])
    assert cache.block_ids(stream) == ()
    assert cache.num_reserved_blocks(stream, 8) == cache.num_peak_blocks(10**6, 8) == 0
    assert cache.take_copies().is_empty
    cache.free(stream)
    cache.invalidate(stream)
    cache.check([child])
    assert (cache.num_blocks, cache.num_blocks_in_use, cache.reset_prefix_cache()) == (0, 0, 0)
    assert cache.num_wasted_slots([stream]) == 0
