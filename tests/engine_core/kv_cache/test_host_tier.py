"""Blocks that the device evicts come back from host memory by their hash."""

import pytest
from paged_memory import Stream, compute, hit_of, make_cache

from engine_core.kv_cache import AllocStatus, KVCacheGroupSpec


def host_cache(num_blocks=3, num_host_blocks=8, **options):
    return make_cache(num_blocks, num_host_blocks=num_host_blocks, watermark=0.0, **options)


def run_and_free(cache, name, tokens, **options):
    """Blocks that were saved, as (device, host)."""
    stream = Stream(name, tokens, **options)
    compute(cache, stream)
    cache.free(stream)
    cache.check()
    return stream, cache.take_copies().swap_out


def evict_all(cache):
    taker = Stream("taker", [99])
    num_tokens = 4 * cache.num_blocks_free // len(cache.groups)
    assert cache.allocate_slots(taker, num_tokens) is not None
    cache.free(taker)
    cache.take_copies()


def admit(cache, tokens, name="again"):
    stream = Stream(name, tokens)
    hit = cache.find_cached_prefix(stream)
    cache.allocate_cached(stream, hit)
    stream.num_computed_tokens = hit.num_tokens
    cache.check()
    return stream, hit


def test_what_is_given_back_is_saved_and_comes_back_after_eviction():
    """Proves S130, S141, S147, S160, S184."""
    cache = host_cache()
    _, saved = run_and_free(cache, "a", [1] * 9)
    assert saved == [(2, 4), (1, 5)]
    assert (cache.host.num_cached, cache.host.num_pinned) == (2, 0)
    evict_all(cache)
    assert cache.num_blocks_cached == 0
    stream, hit = admit(cache, [1] * 9)
    assert (hit.num_tokens, hit.num_host_tokens) == (8, 8)
    assert hit.block_ids == ([0, 0],)
    table = cache.block_ids(stream)[0]
    copies = cache.take_copies()
    assert copies.swap_in == [(5, table[0]), (4, table[1])]
    assert not copies.swap_out
    assert cache.host.num_cached == 2
    assert hit_of(cache, [1] * 9).num_host_tokens == 0


def test_a_hit_may_be_partly_on_the_device():
    cache = host_cache(num_blocks=5)
    run_and_free(cache, "a", [1] * 12)
    run_and_free(cache, "b", [2] * 12)
    stream, hit = admit(cache, [1] * 13)
    assert (hit.num_tokens, hit.num_host_tokens) == (12, 4)
    assert hit.block_ids[0][2] == 0
    assert len(cache.take_copies().swap_in) == 1
    assert len(set(cache.block_ids(stream)[0])) == 3


def test_what_the_host_has_is_not_saved_again():
    cache = host_cache()
    run_and_free(cache, "a", [1] * 9)
    assert run_and_free(cache, "b", [1] * 9)[1] == []
    assert cache.host.num_cached == 2


def test_blocks_in_use_elsewhere_are_saved_when_the_last_lets_go():
    cache = host_cache(num_blocks=4)
    first, second = Stream("a", [1] * 5), Stream("b", [1] * 5)
    compute(cache, first)
    cache.allocate_cached(second, cache.find_cached_prefix(second))
    cache.free(first)
    assert cache.take_copies().is_empty
    cache.free(second)
    assert len(cache.take_copies().swap_out) == 1


def test_the_host_evicts_what_was_unused_longest():
    cache = host_cache(num_blocks=8, num_host_blocks=2)
    for token in (1, 2):
        run_and_free(cache, "a", [token] * 5)
    stream, _ = admit(cache, [1] * 5)
    cache.free(stream)
    run_and_free(cache, "b", [3] * 5)
    evict_all(cache)
    found = [hit_of(cache, [token] * 5).num_tokens for token in (1, 2, 3)]
    assert found == [4, 0, 4]


def test_a_save_whose_host_block_is_taken_again_is_cancelled():
    cache = host_cache(num_blocks=8, num_host_blocks=1)
    streams = [Stream(name, [token] * 5) for name, token in (("a", 1), ("b", 2))]
    for stream in streams:
        compute(cache, stream)
    sources = [cache.block_ids(stream)[0][0] for stream in streams]
    for stream in streams:
        cache.free(stream)
    assert cache.take_copies().swap_out == [(sources[1], 9)]


def test_what_is_saved_in_a_step_is_found_on_the_host_only_in_the_next():
    cache = host_cache()
    stream = Stream("a", [1] * 9)
    compute(cache, stream)
    cache.free(stream)
    taker = Stream("b", [2] * 12)
    cache.allocate_slots(taker, 12)
    assert hit_of(cache, [1] * 9).num_tokens == 0
    assert len(cache.take_copies().swap_out) == 2
    assert hit_of(cache, [1] * 9).num_host_tokens == 8


def test_a_save_gives_way_to_a_swap_in_that_needs_its_block():
    """All free blocks hold what is being saved: one save is cancelled, and leaves the index."""
    cache = host_cache(num_blocks=2)
    run_and_free(cache, "a", [1] * 5)
    evict_all(cache)
    other = Stream("b", [2] * 8)
    compute(cache, other)
    cache.free(other)
    assert cache.host.num_cached == 3
    stream = Stream("again", [1] * 5)
    hit = cache.find_cached_prefix(stream)
    status = cache.can_admit(stream, hit, max_chunk=8, head_room=0, is_resumed=False)
    assert status is AllocStatus.OK
    cache.allocate_cached(stream, hit)
    cache.check()
    copies = cache.take_copies()
    ((host_block, block_id),) = copies.swap_in
    ((saved, saved_to),) = copies.swap_out
    assert saved != block_id
    assert saved_to != host_block
    assert cache.host.num_cached == 2


def test_another_block_is_taken_rather_than_a_save_cancelled():
    cache = host_cache(num_blocks=3)
    run_and_free(cache, "a", [1] * 5)
    evict_all(cache)
    run_and_free(cache, "saved", [2] * 5)
    saving = Stream("saving", [3] * 5)
    compute(cache, saving)
    (source, _) = cache.block_ids(saving)[0]
    cache.free(saving)
    saved, _ = admit(cache, [2] * 5, "saved again")
    (target,) = cache.block_ids(saved)[0]
    cache.free(saved)
    cache.allocate_slots(Stream("holder", [4]), 1)
    # free are the block being saved, the longest unused, and one that the host has
    admit(cache, [1] * 5)
    copies = cache.take_copies()
    assert [device for _, device in copies.swap_in] == [target]
    assert [device for device, _ in copies.swap_out] == [source]


def test_a_block_that_must_be_swapped_out_first_is_not_swapped_into():
    """Both blocks are read by the swap out, so the hit waits for the next step."""
    cache = host_cache(num_blocks=2)
    run_and_free(cache, "a", [1] * 5)
    evict_all(cache)
    victim = Stream("b", [2] * 8)
    compute(cache, victim)
    assert cache.swap_out([victim]) == 2
    stream = Stream("again", [1] * 5)
    hit = cache.find_cached_prefix(stream)
    options = {"max_chunk": 8, "head_room": 0, "is_resumed": False}
    assert cache.can_admit(stream, hit, **options) is AllocStatus.LATER
    cache.take_copies()
    assert cache.can_admit(stream, hit, **options) is AllocStatus.OK


def test_without_host_room_nothing_is_saved_and_nothing_fails():
    cache = host_cache(num_blocks=6, num_host_blocks=1)
    pinned = Stream("a", [1] * 3)
    compute(cache, pinned)
    assert cache.swap_out([pinned]) == 1
    cache.take_copies()
    assert run_and_free(cache, "b", [2] * 9)[1] == []
    assert cache.num_blocks_cached == 2


def test_forgetting_takes_the_host_copy_along():
    cache = host_cache()
    run_and_free(cache, "a", [1] * 9)
    evict_all(cache)
    stream, _ = admit(cache, [1] * 10)
    cache.invalidate(stream, 5)
    assert cache.host.num_cached == 1
    assert hit_of(cache, [1] * 10).num_tokens == 4
    cache.check()


def test_forgetting_cancels_a_save_that_is_not_made_yet():
    cache = host_cache(num_blocks=8)
    stream = Stream("a", [1] * 5)
    compute(cache, stream)
    cache.free(stream)
    again, _ = admit(cache, [1] * 6)
    cache.invalidate(again)
    assert cache.take_copies().is_empty
    assert cache.host.num_cached == 0


def test_a_reset_empties_both_tiers_and_cancels_what_is_being_saved():
    cache = host_cache()
    run_and_free(cache, "a", [1] * 9)
    stream = Stream("b", [2] * 5)
    compute(cache, stream)
    cache.free(stream)
    assert cache.reset_prefix_cache() == 2 + 3
    assert cache.take_copies().is_empty
    assert (cache.host.num_cached, cache.num_blocks_cached) == (0, 0)
    cache.check()


@pytest.mark.parametrize("window", [2, 5])
def test_a_sliding_group_takes_its_window_from_the_host(window):
    groups = (KVCacheGroupSpec(), KVCacheGroupSpec(window))
    cache = host_cache(num_blocks=8, num_host_blocks=20, groups=groups)
    run_and_free(cache, "a", [1] * 13)
    evict_all(cache)
    stream, hit = admit(cache, [1] * 13)
    assert (hit.num_tokens, hit.num_host_tokens) == (12, 12)
    assert len(hit.host_blocks) == 3 + 1
    assert cache.block_ids(stream)[1][:2] == [0, 0]
    assert len(cache.take_copies().swap_in) == 4
