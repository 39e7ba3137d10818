"""Why a look-up found no more than it did."""

import pytest
from paged_memory import Stream, compute, make_cache

from engine_core.kv_cache.block_pool import EvictedHashes
from engine_core.kv_cache.prefix_cache import FirstBlocks
from protocol.explanations import LookupEnd


def why(cache, tokens, **options):
    stream = Stream("probe", tokens, **options)
    return cache.explain_lookup(stream, cache.find_cached_prefix(stream))


def test_complete_too_short_and_never_seen():
    cache = make_cache()
    compute(cache, Stream("a", list(range(9))))
    assert why(cache, list(range(9))) is LookupEnd.COMPLETE
    assert why(cache, list(range(4))) is LookupEnd.TOO_SHORT
    assert why(cache, list(range(13))) is LookupEnd.NEVER_SEEN
    assert why(cache, [7] * 9) is LookupEnd.NEVER_SEEN


@pytest.mark.parametrize("num_host_blocks", [0, 1])
def test_evicted_until_it_is_long_ago(num_host_blocks):
    cache = make_cache(num_blocks=2, num_host_blocks=num_host_blocks)

    def run(token):
        stream = Stream("a", [token] * 8)
        compute(cache, stream)
        cache.free(stream)
        cache.take_copies()

    run(1)
    run(2)
    run(3)
    assert why(cache, [1] * 9) is LookupEnd.EVICTED
    for token in range(4, 12):
        run(token)
    assert why(cache, [1] * 9) is LookupEnd.NEVER_SEEN


def test_what_was_reset_was_there_once():
    cache = make_cache()
    stream = Stream("a", [1] * 8)
    compute(cache, stream)
    cache.free(stream)
    cache.reset_prefix_cache()
    assert why(cache, [1] * 9) is LookupEnd.EVICTED


def test_known_under_another_salt_or_adapter():
    cache = make_cache()
    compute(cache, Stream("a", [1] * 8, cache_salt="x"))
    compute(cache, Stream("b", [2] * 8))
    other = LookupEnd.OTHER_SALT_OR_ADAPTER
    assert why(cache, [1] * 9) is other
    assert why(cache, [1] * 9, cache_salt="y") is other
    assert why(cache, [1] * 9, adapter="x") is other
    assert why(cache, [2] * 9, cache_salt="x") is other
    assert why(cache, [1] * 9, cache_salt="x") is LookupEnd.COMPLETE
    assert why(cache, [3] * 9, cache_salt="x") is LookupEnd.NEVER_SEEN
    # further on than the first block, other salts do not matter
    assert why(cache, [2] * 8 + [5] * 5) is LookupEnd.NEVER_SEEN


def test_what_is_remembered_is_bounded():
    evicted = EvictedHashes(2)
    for name in (b"1", b"2", b"3"):
        evicted.add(name)
    assert [name in evicted for name in (b"1", b"2", b"3")] == [False, True, True]
    evicted = EvictedHashes(400)
    for number in range(300):
        evicted.add(*(b"%d %d" % (number, place) for place in range(3)))
        known = [b"%d %d" % (last, 2) in evicted for last in range(number, -1, -1)]
        assert all(known[:110])  # 330 hashes
        assert not any(known[134:])
    first = FirstBlocks(2)
    for name in (b"1", b"2", b"3"):
        first.add(name, b"root")
    assert first.is_known_elsewhere(b"3", b"other root")
    assert not first.is_known_elsewhere(b"3", b"root")
    assert not first.is_known_elsewhere(b"1", b"other root")
