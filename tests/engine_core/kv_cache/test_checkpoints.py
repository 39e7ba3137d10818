"""Sparse groups: which blocks have a state, and from which of them others start."""

import pytest
from paged_memory import Stream, compute, hit_of, make_cache

from engine_core.kv_cache import KVCacheGroupSpec

KEYS, STATE = KVCacheGroupSpec(), KVCacheGroupSpec(2, is_sparse=True, pool=1)


def make(num_states=40, **options):
    """Blocks of 4 tokens."""
    return make_cache([200, num_states], groups=(KEYS, STATE), **options)


def places(cache, stream):
    """Of the blocks with a state."""
    return [index for index, block_id in enumerate(cache.block_ids(stream)[1]) if block_id]


def num_in_use(cache):
    return cache._pool.ids.sizes[1] - cache._pool.free[1]


def decode(cache, stream, tokens):
    for token in tokens:
        stream.tokens.append(token)
        compute(cache, stream, 1)
        cache.drop_out_of_windows(stream)


@pytest.mark.parametrize(
    ("length", "interval", "expected"),
    [
        (3, 0, [0]),
        (8, 0, [0, 1]),
        (9, 0, [1, 2]),
        (40, 0, [8, 9]),
        (41, 0, [9, 10]),
        (41, 12, [2, 5, 8, 9, 10]),
        (41, 3, list(range(11))),
    ],
)
def test_a_chunk_has_states_at_its_end_and_every_so_many_tokens(length, interval, expected):
    cache = make(checkpoint_interval=interval)
    stream = Stream("a", list(range(length)))
    compute(cache, stream)
    assert places(cache, stream) == expected


def test_checkpoints_are_made_where_there_is_room_and_the_rest_always():
    cache = make(num_states=4, checkpoint_interval=8)
    stream = Stream("a", list(range(41)))
    compute(cache, stream)
    assert places(cache, stream) == [1, 3, 9, 10]


def test_a_sequence_in_chunks_holds_its_last_full_block_and_the_next():
    cache, stream = make(), Stream("a", list(range(64)))
    for num_tokens, expected in (
        (21, [4, 5]),
        (1, [4, 5]),
        (20, [4, 5, 9, 10]),
        (22, [9, 10, 14, 15]),
    ):
        compute(cache, stream, num_tokens)
        assert places(cache, stream) == expected
    assert hit_of(cache, stream.tokens[:43]).num_tokens == 40
    decode(cache, stream, range(9))
    assert places(cache, stream) == [17, 18]
    assert hit_of(cache, stream.tokens[:43]).num_tokens == 0, "no checkpoint, and out of reach"
    assert hit_of(cache, stream.tokens[:64]).num_tokens == 60, "where the prompt is found again"
    assert num_in_use(cache) == 2


@pytest.mark.parametrize("num_more", range(9))
def test_what_ends_leaves_the_state_of_its_last_full_block(num_more):
    cache, stream = make(), Stream("a", list(range(10)))
    compute(cache, stream)
    decode(cache, stream, range(num_more))
    cache.free(stream)
    assert hit_of(cache, [*stream.tokens, 1]).num_tokens == (10 + num_more) // 4 * 4
    assert cache._pool.num_hashes(1) == (1 if num_more < 2 else 2)
    assert num_in_use(cache) == 0


def test_a_conversation_finds_all_but_one_block_of_its_past():
    cache, tokens = make(), list[int]()
    for turn in range(10):
        before = max(0, len(tokens) - 1)
        stream = Stream(str(turn), [*tokens, *range(100 * turn, 100 * turn + 13 + turn)])
        hit = cache.find_cached_prefix(stream)
        assert hit.num_tokens == before // 4 * 4
        cache.allocate_cached(stream, hit)
        stream.num_computed_tokens = hit.num_tokens
        compute(cache, stream)
        decode(cache, stream, range(11))
        tokens = [*stream.tokens, 7]  # the last one is sampled, and not computed
        cache.free(stream)
    assert cache._pool.num_hashes(1) <= 2 * 10


def test_a_state_is_made_where_the_keys_of_another_prompt_end():
    cache = make()
    first = Stream("a", list(range(50)))
    compute(cache, first)
    second, third = (Stream(name, [*range(30), *[ord(name)] * 30]) for name in "bc")
    for stream, num_found in ((second, 0), (third, 28)):
        hit = cache.find_cached_prefix(stream)
        assert (hit.num_tokens, hit.num_key_tokens) == (num_found, 28)
        cache.allocate_cached(stream, hit)
        stream.num_computed_tokens = num_found
        compute(cache, stream)
    assert places(cache, second) == [6, 13, 14]
    for stream in (third, second, first):
        decode(cache, stream, range(20))
        cache.free(stream)
    assert hit_of(cache, [*range(30), 0, 0]).num_tokens == 28, "nobody dropped it"
