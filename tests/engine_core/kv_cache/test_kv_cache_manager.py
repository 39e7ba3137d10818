"""Block tables of sequences: allocation, admission, windows, prefix hits, eviction."""

import pytest
from paged_memory import Stream, compute, hit_of, make_cache

from engine_core.kv_cache import AllocStatus, KVCacheGroupSpec, KVCacheManager
from protocol.explanations import LookupEnd

FULL = KVCacheGroupSpec()


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (63, 16)]
)
def test_a_sequence_takes_as_many_blocks_as_its_tokens_need(num_tokens, num_blocks):
    """Proves S145, S171, S172, S173, S177, S178, S179, S183."""
    cache = make_cache()
    stream = Stream("a", list(range(num_tokens)))
    update = compute(cache, stream)
    assert update.start == 0
    (blocks,) = update.block_ids
    assert len(blocks) == num_blocks == cache.num_blocks_in_use
    assert cache.block_ids(stream) == (blocks,)
    assert cache.num_allocated_slots(stream) == num_blocks * 4
    cache.free(stream)
    assert (cache.num_blocks_in_use, cache.num_allocated_slots(stream)) == (0, 0)
    cache.free(stream)
    cache.check()


def test_lookahead_slots_are_behind_the_tokens():
    cache = make_cache()
    stream = Stream("a", list(range(4)))
    assert len(cache.allocate_slots(stream, 4, 1).block_ids[0]) == 2
    assert cache.num_allocated_slots(stream) == 8
    stream.num_computed_tokens = 4
    assert cache.allocate_slots(stream, 1, 3).is_empty
    assert cache.allocate_slots(stream, 1, 4).start == 2


def test_without_room_nothing_is_taken():
    """Proves S153, S171."""
    cache = make_cache(num_blocks=2)
    stream = Stream("a", list(range(9)))
    assert compute(cache, stream) is None
    assert cache.num_blocks_in_use == 0
    assert compute(cache, stream, 8) is not None


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (30, 12)]
)
def test_a_hit_is_whole_blocks_and_never_the_last_token(num_tokens, num_hit):
    """Proves S162, S180."""
    cache = make_cache()
    compute(cache, Stream("a", list(range(15))))
    hit = hit_of(cache, list(range(num_tokens)))
    assert hit.num_tokens == num_hit
    assert len(hit.block_ids[0]) == num_hit // 4


def test_prefix_caching_can_be_switched_off():
    """Proves S159, S174."""
    cache = make_cache(enable_prefix_caching=False)
    stream = Stream("a", list(range(12)))
    compute(cache, stream)
    hit = hit_of(cache, stream.tokens)
    assert hit.num_tokens == 0
    assert cache.explain_lookup(stream, hit) is LookupEnd.OFF
    cache.free(stream)
    assert (cache.num_blocks_cached, stream.block_hashes) == (0, [])


def test_each_block_is_hashed_once_in_a_life_with_a_preemption():
    """Proves S028."""
    cache = make_cache()
    stream = Stream("a", list(range(14)))
    for _ in range(2):
        cache.find_cached_prefix(stream)
        compute(cache, stream, 5)
        compute(cache, stream)
        cache.free(stream)
        stream.num_computed_tokens = 0
    assert stream.num_hashed_bytes == 12 * 4


def test_a_single_token_registers_its_block_at_the_next_block():
    """Proves S168."""
    cache = make_cache()
    stream = Stream("a", list(range(9)))
    compute(cache, stream, 3)
    compute(cache, stream, 1)
    assert hit_of(cache, list(range(9))).num_tokens == 0
    compute(cache, stream, 1)
    assert hit_of(cache, list(range(9))).num_tokens == 4
    for _ in range(3):
        compute(cache, stream, 1)
    assert hit_of(cache, list(range(9))).num_tokens == 4
    cache.free(stream)
    assert hit_of(cache, list(range(9))).num_tokens == 8


def test_what_is_given_back_before_its_step_runs_cannot_be_found():
    cache = make_cache()
    stream = Stream("a", list(range(13)))
    compute(cache, stream, 4)
    cache.allocate_slots(stream, 8)
    assert hit_of(cache, list(range(13))).num_tokens == 12
    cache.free(stream)
    assert hit_of(cache, list(range(13))).num_tokens == 4


def test_drafts_take_slots_but_never_enter_the_prefix_cache():
    cache = make_cache()
    stream = Stream("a", [1, 2, 3])
    compute(cache, stream, 6)
    assert cache.num_blocks_in_use == 2
    assert hit_of(cache, [1, 2, 3, 0, 0]).num_tokens == 0
    # one draft was accepted and another token came: the first block is full of real tokens
    stream.tokens += [4, 5]
    stream.num_computed_tokens = 4
    compute(cache, stream, 1)
    assert hit_of(cache, [1, 2, 3, 4, 9]).num_tokens == 4


def test_the_tail_is_evicted_before_the_head_and_the_older_sequence_first():
    """Proves S165."""
    cache = make_cache(num_blocks=6)
    old, new = Stream("old", [1] * 12), Stream("new", [2] * 12)
    for stream in (new, old):
        compute(cache, stream)
    cache.free(old)
    cache.free(new)
    taker = Stream("b", [7] * 24)
    left = []
    for _ in range(5):
        compute(cache, taker, 4)
        left.append([hit_of(cache, [token] * 13).num_tokens // 4 for token in (1, 2)])
    assert left == [[2, 3], [1, 3], [0, 3], [0, 2], [0, 1]]


def test_blocks_of_one_moment_and_depth_are_evicted_by_id():
    """Proves S165."""
    cache = make_cache(num_blocks=4, groups=(FULL, FULL))
    stream = Stream("a", list(range(8)))
    compute(cache, stream)
    first, second = cache.block_ids(stream)
    cache.free(stream)
    taker = Stream("b", [9] * 8)
    compute(cache, taker)
    assert cache.block_ids(taker) == (
        sorted((first[1], second[1])),
        sorted((first[0], second[0])),
    )


def test_freed_blocks_stay_cached_until_the_cache_is_reset():
    """Proves S164, S167."""
    cache = make_cache()
    holder, gone = Stream("a", [1] * 9), Stream("b", [2] * 9)
    compute(cache, holder)
    compute(cache, gone)
    cache.free(gone)
    assert (cache.num_blocks_cached, cache.num_blocks_in_use, cache.num_blocks_free) == (2, 3, 17)
    assert cache.reset_prefix_cache() == 2
    assert hit_of(cache, [2] * 9).num_tokens == 0
    assert hit_of(cache, [1] * 9).num_tokens == 8
    cache.check([holder])


def test_used_cached_free_blocks_and_wasted_slots_are_counted():
    """Proves S186."""
    cache = make_cache()
    holder, gone = Stream("a", [1] * 9), Stream("b", [2] * 9)
    compute(cache, holder)
    compute(cache, gone)
    cache.free(gone)
    assert (cache.num_blocks_in_use, cache.num_blocks_cached, cache.num_blocks_free) == (3, 2, 17)
    assert cache.num_wasted_slots([holder, gone]) == 3
    child = Stream("c", [1] * 10, 9)
    cache.fork(holder, child, 9)
    assert cache.num_wasted_slots([holder, child]) == 2
    assert cache.num_shared_references == 3


def ask(cache, num_tokens, num_reserved_blocks=0, is_alone=False, is_resumed=False, **options):
    stream = Stream("b", [5] * num_tokens)
    hit = cache.find_cached_prefix(stream)
    options["head_room"] = num_reserved_blocks + (0 if is_alone else cache.watermark_blocks)
    return cache.can_admit(stream, hit, max_chunk=8, is_resumed=is_resumed, **options)


def test_can_admit_answers_now_later_or_never():
    """Proves S133, S134, S135."""
    cache = make_cache(num_blocks=10, watermark=0.1)
    assert ask(cache, 36) is AllocStatus.OK
    assert ask(cache, 37) is AllocStatus.NEVER
    assert ask(cache, 36, 1) is AllocStatus.LATER
    assert ask(cache, 32, num_lookahead_slots=4) is AllocStatus.OK
    assert ask(cache, 32, num_lookahead_slots=5) is AllocStatus.NEVER
    assert ask(cache, 32, num_extra_blocks=1) is AllocStatus.OK
    assert ask(cache, 32, num_extra_blocks=2) is AllocStatus.NEVER
    compute(cache, Stream("a", [5] * 24))
    # four of ten are free; five or six of the blocks needed are shared with a
    assert ask(cache, 24) is AllocStatus.OK
    assert ask(cache, 36) is AllocStatus.OK
    assert ask(cache, 36, 1) is AllocStatus.LATER
    # what is shared now must fit too when it is not shared any more
    assert ask(cache, 37) is AllocStatus.NEVER


def test_the_head_room_does_not_keep_out_what_was_admitted_before():
    """Proves S135."""
    cache = make_cache(num_blocks=10, watermark=0.1)
    assert ask(cache, 40, is_resumed=True) is AllocStatus.LATER
    assert ask(cache, 40, is_resumed=True, is_alone=True) is AllocStatus.OK
    assert ask(cache, 41, is_resumed=True, is_alone=True) is AllocStatus.NEVER


def test_found_blocks_that_are_free_still_cost_a_free_block():
    cache = make_cache(num_blocks=4, watermark=0.0)
    gone = Stream("a", [5] * 8)
    compute(cache, gone)
    cache.free(gone)
    compute(cache, Stream("c", [6] * 8))
    assert ask(cache, 9) is AllocStatus.LATER
    assert ask(cache, 8) is AllocStatus.OK


def test_reserved_blocks_are_those_not_yet_allocated():
    cache = make_cache()
    stream = Stream("a", list(range(30)))
    assert cache.num_reserved_blocks(stream, 8) == cache.num_peak_blocks(30, 8) == 8
    compute(cache, stream, 8)
    assert cache.num_reserved_blocks(stream, 8) == 6
    assert cache.num_reserved_blocks(stream, 8, 3) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_host_blocks": -1}, "num_host_blocks is -1"),
    ],
)
def test_limits_are_checked_with_their_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**options)


def test_each_argument_of_the_cache_has_its_effect_and_its_default():
    """Proves S132."""
    plain = KVCacheManager(num_blocks=200, block_size=4)
    assert (plain.num_blocks, plain.num_blocks_free, plain.block_size) == (200, 200, 4)
    assert (plain.watermark_blocks, plain.host.num_blocks, plain.has_windows) == (2, 0, False)
    cache = KVCacheManager(
        num_blocks=200,
        block_size=8,
        groups=(KVCacheGroupSpec(8),),
        enable_prefix_caching=False,
        watermark=0.1,
        num_host_blocks=7,
    )
    assert (cache.block_size, cache.watermark_blocks, cache.host.num_blocks) == (8, 20, 7)
    assert cache.has_windows
    for each, num_found in ((plain, 8), (cache, 0)):
        compute(each, stream := Stream("a", list(range(12))))
        each.free(stream)
        assert hit_of(each, list(range(12))).num_tokens == num_found
