"""Groups with a window: what is dropped, what is needed, what is found."""

import pytest
from paged_memory import Stream, compute, hit_of, make_cache

from engine_core.kv_cache import KVCacheGroupSpec

FULL = KVCacheGroupSpec()


def test_a_sliding_group_drops_what_no_token_can_read_any_more():
    """Window 5, blocks of 4, about to compute position 12: it reads from 8 on. Proves S146,
    S175."""
    cache = make_cache(groups=(FULL, KVCacheGroupSpec(5)))
    stream = Stream("a", list(range(12)))
    compute(cache, stream)
    assert cache.num_blocks_in_use == 6
    stream.tokens.append(12)
    compute(cache, stream)
    full, sliding = cache.block_ids(stream)
    assert 0 not in full
    assert sliding[:2] == [0, 0]
    assert 0 not in sliding[2:]
    assert cache.num_blocks_in_use == 6


def test_blocks_out_of_the_window_are_free_though_no_block_is_taken():
    """Window 8, blocks of 4, after one chunk of 33 tokens. Proves S146, S175."""
    cache = make_cache(groups=(KVCacheGroupSpec(8),))
    stream = Stream("a", list(range(34)))
    compute(cache, stream, 33)
    assert cache.num_blocks_in_use == 9
    compute(cache, stream, 1)
    assert cache.block_ids(stream)[0][:6] == [0] * 6
    assert cache.num_blocks_in_use == 3
    cache.check([stream])


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
def test_the_next_position_that_lets_a_block_go_is_exact(window):
    spec = KVCacheGroupSpec(window)
    for position in range(40):
        num_dropped = [spec.num_dropped_blocks(later, 4) for later in range(position, 60)]
        assert spec.next_drop(position, 4) == position + num_dropped.index(num_dropped[0] + 1)


def test_a_token_in_flight_does_not_move_the_window():
    """Window 5, blocks of 1: position 12 is planned while 12 tokens are known. Should the token in
    flight be lost, position 11 is computed again, and reads from 7 on."""
    cache = make_cache(block_size=1, groups=(KVCacheGroupSpec(5),))
    stream = Stream("a", list(range(12)))
    compute(cache, stream)
    assert stream.num_computed_tokens == stream.num_tokens
    compute(cache, stream, 1)
    (table,) = cache.block_ids(stream)
    assert table[:7] == [0] * 7
    assert 0 not in table[7:]


def test_nothing_is_dropped_where_there_is_no_room():
    """Window 4 at position 8 frees one block of the two wanted."""
    cache = make_cache(num_blocks=2, groups=(KVCacheGroupSpec(4),))
    stream = Stream("a", list(range(16)))
    compute(cache, stream, 8)
    before = cache.block_ids(stream)
    assert compute(cache, stream, 8) is None
    assert cache.block_ids(stream) == before
    assert compute(cache, stream, 4).start == 2
    assert cache.block_ids(stream)[0][0] == 0


def test_a_block_that_fills_and_falls_out_at_once_can_still_be_found():
    cache = make_cache(groups=(FULL, KVCacheGroupSpec(1)))
    stream = Stream("a", list(range(9)))
    for _ in range(9):
        compute(cache, stream, 1)
    assert cache.block_ids(stream)[1][:2] == [0, 0]
    assert hit_of(cache, list(range(9))).num_tokens == 8


def test_a_sliding_group_needs_only_its_window_before_the_boundary():
    cache = make_cache(groups=(FULL, KVCacheGroupSpec(5)))
    stream = Stream("a", list(range(13)))
    compute(cache, stream)
    tables = cache.block_ids(stream)
    hit = hit_of(cache, list(range(13)))
    assert hit.num_tokens == 12
    assert hit.block_ids == (tables[0][:3], [0, 0, tables[1][2]])


def test_a_boundary_whose_window_is_gone_is_not_a_hit():
    cache = make_cache(num_blocks=40, groups=(FULL, KVCacheGroupSpec(6)))
    stream = Stream("a", list(range(17)))
    compute(cache, stream)
    # the sliding group loses block 2: boundaries 12 and 16 need it, 8 does not
    cache._pool.unindex([cache.block_ids(stream)[1][2]])
    assert hit_of(cache, list(range(20))).num_tokens == 8


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_the_peak_of_a_sliding_group_is_never_passed(window):
    spec = KVCacheGroupSpec(window)
    for block_size in (1, 2, 3, 4):
        for chunk in (1, 2, 3, 7):
            cache = make_cache(num_blocks=99, block_size=block_size, groups=(spec,))
            stream = Stream("a", list(range(40)))
            peak = spec.num_peak_blocks(40, chunk, block_size)
            while stream.num_computed_tokens < 40:
                compute(cache, stream, min(chunk, 40 - stream.num_computed_tokens))
                assert cache.num_blocks_in_use <= peak


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="reach is 0"):
        KVCacheGroupSpec(0)
