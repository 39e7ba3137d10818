"""Rules of shared blocks: deduplication, copy before a write, order of eviction."""

import pytest
from paged_memory import Stream, compute, hit_of, make_cache

from engine_core.kv_cache import AllocStatus

# ---------------------------------------------------------------------- equal blocks become one


def twins(**options):
    """Two streams of equal tokens whose first blocks fill during decode, each its own."""
    cache = make_cache(**options)
    streams = Stream("a", [1] * 5), Stream("b", [1] * 5)
    for stream in streams:
        compute(cache, stream, 3)
        compute(cache, stream, 1)
    return cache, *streams


def test_a_block_that_fills_and_equals_a_known_one_is_given_back_by_default():
    """One block in common and a tail each: the private one is free for others again. Proves
    S169."""
    cache, first, second = twins()
    for stream in (first, second):
        compute(cache, stream, 1)
    (known, tail), (adopted, other_tail) = cache.block_ids(first)[0], cache.block_ids(second)[0]
    assert adopted == known
    assert len({known, tail, other_tail}) == 3
    assert (cache.num_blocks_in_use, cache.num_deduplicated_blocks) == (3, 1)
    assert cache.num_shared_references == 1


def test_the_table_names_the_known_block_before_the_private_one_can_be_taken():
    """The update of the step that gave it back says so, and the next sequence gets another id
    than any of the table. Proves S169."""
    cache, first, second = twins()
    compute(cache, first, 1)
    private = cache.block_ids(second)[0][0]
    update = cache.allocate_slots(second, 1)
    second.num_computed_tokens += 1
    known = cache.block_ids(first)[0][0]
    assert update.block_ids[0] == cache.block_ids(second)[0]
    assert update.block_ids[0][0] == known != private
    cache.check([first, second])
    third = Stream("c", list(range(50, 90)))
    assert cache.allocate_slots(third, 40) is not None
    assert set(cache.block_ids(third)[0]).isdisjoint(cache.block_ids(second)[0])
    assert cache._pool.ref_count(known) == 2


def test_no_table_names_the_private_block_any_more_when_it_is_given_back(monkeypatch):
    """And the known one is held by then. Proves S169."""
    cache, first, second = twins()
    compute(cache, first, 1)
    (known, _), (private,) = cache.block_ids(first)[0], cache.block_ids(second)[0]
    release, tables = cache._offload.release, []

    def watched(block_ids):
        tables.append((list(block_ids), cache.block_ids(second)[0], cache._pool.ref_count(known)))
        release(block_ids)

    monkeypatch.setattr(cache._offload, "release", watched)
    compute(cache, second, 1)
    assert tables == [([private], [known], 2)]


def test_without_prefix_caching_equal_blocks_stay_apart():
    """Proves S169, S174."""
    cache, first, second = twins(enable_prefix_caching=False)
    compute(cache, first, 1)
    compute(cache, second, 1)
    assert set(cache.block_ids(first)[0]).isdisjoint(cache.block_ids(second)[0])
    assert cache.num_deduplicated_blocks == 0


@pytest.mark.parametrize(
    ("theirs", "mine"),
    [
        ({}, {"cache_salt": "s"}),
        ({}, {"adapter": "l"}),
        ({"cache_salt": "s"}, {"cache_salt": "t"}),
        ({"adapter": "l"}, {"adapter": "m"}),
        ({"adapter": "l"}, {"cache_salt": "l"}),
        ({"adapter": "l", "cache_salt": "s"}, {"adapter": "l", "cache_salt": "t"}),
    ],
)
def test_a_block_of_another_salt_or_adapter_is_neither_found_nor_adopted(theirs, mine):
    """Proves S027, S162, S169, S209."""
    cache = make_cache()
    first, second = Stream("a", [1] * 5, **theirs), Stream("b", [1] * 5, **mine)
    for stream in (first, second):
        for num_tokens in (3, 1, 1):
            assert hit_of(cache, [1] * 6, **mine).num_tokens == 0
            compute(cache, stream, num_tokens)
    assert set(cache.block_ids(first)[0]).isdisjoint(cache.block_ids(second)[0])
    assert hit_of(cache, [1] * 6, **mine).block_ids == ([cache.block_ids(second)[0][0]],)
    assert hit_of(cache, [1] * 6, **theirs).block_ids == ([cache.block_ids(first)[0][0]],)


# ---------------------------------------------------------------------- copied before written


@pytest.mark.parametrize("num_holders", [2, 3, 5])
def test_a_partly_filled_block_is_copied_for_each_writer_but_the_last(num_holders):
    """Proves S163, S181."""
    cache = make_cache()
    parent = Stream("p", list(range(6)))
    compute(cache, parent)
    children = [Stream(f"c{n}", [*range(6), n], 6) for n in range(1, num_holders)]
    for child in children:
        cache.fork(parent, child, 6)
    head, tail = cache.block_ids(parent)[0]
    assert cache._pool.ref_count(head) == cache._pool.ref_count(tail) == num_holders
    copied = []
    for stream in (*children, parent):
        if stream is parent:
            parent.tokens.append(9)
        assert cache.allocate_slots(stream, 1) is not None
        stream.num_computed_tokens += 1
        copied += cache.take_copies().copy
        assert cache._pool.ref_count(cache.block_ids(stream)[0][1]) == 1
        assert cache.block_ids(stream)[0][0] == head
    assert [source for source, _ in copied] == [tail] * (num_holders - 1)
    assert len({target for _, target in copied} | {tail}) == num_holders
    cache.check([parent, *children])


def test_between_requests_only_full_blocks_are_shared():
    """Six equal tokens, blocks of four: the fifth and sixth are computed again. Proves S163,
    S180."""
    cache = make_cache()
    first = Stream("a", [1, 2, 3, 4, 5, 6, 7])
    compute(cache, first)
    second = Stream("b", [1, 2, 3, 4, 5, 6, 8])
    hit = cache.find_cached_prefix(second)
    assert (hit.num_tokens, hit.block_ids) == (4, (cache.block_ids(first)[0][:1],))
    cache.allocate_cached(second, hit)
    second.num_computed_tokens = 4
    compute(cache, second)
    assert cache.block_ids(first)[0][1] != cache.block_ids(second)[0][1]


# ---------------------------------------------------------------------- who is evicted first


def cached_prefixes(cache, streams):
    """Which of the streams' first blocks can be found."""
    return [hit_of(cache, [*stream.tokens[:4], 0]).num_tokens == 4 for stream in streams]


def test_the_longest_unused_block_goes_first_and_use_makes_it_young_again():
    """Proves S164, S165."""
    cache = make_cache(num_blocks=3)
    streams = [Stream(name, [place] * 4) for place, name in enumerate("abc")]
    for stream in streams:
        compute(cache, stream)
    for stream in streams:
        cache.free(stream)
    again = Stream("again", [*streams[0].tokens, 9])
    cache.allocate_cached(again, cache.find_cached_prefix(again))
    cache.free(again)
    for expected in ([True, False, True], [True, False, False], [False, False, False]):
        taker = Stream(f"t{expected}", [70])
        assert cache.allocate_slots(taker, 1) is not None
        assert cached_prefixes(cache, streams) == expected


def test_of_blocks_given_back_at_once_the_one_with_more_hashed_tokens_goes_first():
    """A sequence's tail before its head. Proves S165."""
    cache = make_cache(num_blocks=4)
    stream = Stream("a", list(range(16)))
    compute(cache, stream)
    table = cache.block_ids(stream)[0]
    cache.free(stream)
    taker = Stream("taker", [99] * 16)
    assert cache.allocate_slots(taker, 16) is not None
    assert cache.block_ids(taker)[0] == table[::-1]


def test_of_equally_many_hashed_tokens_the_smaller_block_id_goes_first():
    """Two sequences that leave as one, whose tables were filled against the order of ids. Proves
    S165."""
    cache = make_cache(num_blocks=8, num_host_blocks=8)
    early, late = Stream("early", list(range(8))), Stream("late", list(range(20, 28)))
    spare = Stream("spare", [9] * 8)
    for stream in (spare, early):
        compute(cache, stream)
    cache.free(spare)
    cache.reset_prefix_cache()
    compute(cache, late)
    (early_ids,), (late_ids,) = cache.block_ids(early), cache.block_ids(late)
    assert max(late_ids) < min(early_ids)
    assert cache.swap_out([early, late]) == 4  # at once, the one of larger ids first
    cache.take_copies()
    taker = Stream("taker", [99] * 32)
    assert cache.allocate_slots(taker, 32) is not None
    assert cache.block_ids(taker)[0][4:] == [
        *sorted([early_ids[1], late_ids[1]]),
        *sorted([early_ids[0], late_ids[0]]),
    ]


# ---------------------------------------------------------------------- in any case


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 9])
def test_the_last_token_is_never_found(num_tokens):
    """Also where all of the prompt's blocks are. Proves S088."""
    cache = make_cache()
    for stream in (Stream("a", list(range(num_tokens + 4))), Stream("b", list(range(num_tokens)))):
        compute(cache, stream)
        cache.free(stream)
    assert hit_of(cache, list(range(num_tokens))).num_tokens == (num_tokens - 1) // 4 * 4


def test_the_last_token_of_a_cached_prompt_is_computed_into_a_block_of_its_own():
    """The cached block of the whole prompt stays as it is. Proves S166."""
    cache = make_cache()
    first = Stream("a", list(range(8)))
    compute(cache, first)
    second = Stream("b", list(range(8)))
    cache.allocate_cached(second, cache.find_cached_prefix(second))
    second.num_computed_tokens = 4
    status = cache.can_admit(
        Stream("c", list(range(8))),
        hit_of(cache, list(range(8))),
        max_chunk=8,
        head_room=cache.watermark_blocks,
        is_resumed=False,
    )
    assert status is AllocStatus.OK
    compute(cache, second, 4)
    assert cache.block_ids(first)[0][1] != cache.block_ids(second)[0][1]


# ---------------------------------------------------------------------- what is handed over


def test_a_step_hands_over_its_three_lists_once():
    """A pair goes out while another comes back and writes into what the two of it share: device
    ids below those of the host, each block filled once. Proves S130, S141."""
    cache = make_cache(num_blocks=12, num_host_blocks=12, enable_prefix_caching=False)
    pairs = []
    for name, first in (("a", 0), ("b", 50)):
        parent = Stream(name, list(range(first, first + 6)))
        compute(cache, parent)
        child = Stream(f"{name}'", [*parent.tokens, 9], 6)
        cache.fork(parent, child, 6)
        pairs.append([parent, child])
    one, other = pairs
    assert cache.swap_out(one) == 2
    cache.take_copies()
    assert cache.swap_out(other) == 2
    cache.swap_in(one)
    assert cache.allocate_slots(one[1], 1) is not None
    copies = cache.take_copies()
    sizes = [len(pairs) for pairs in (copies.swap_in, copies.swap_out, copies.copy)]
    assert sizes == [2, 2, 1]
    assert all(host > 12 >= device > 0 for host, device in copies.swap_in)
    assert all(host > 12 >= device > 0 for device, host in copies.swap_out)
    assert copies.copy == [(cache.block_ids(one[0])[0][1], cache.block_ids(one[1])[0][1])]
    assert copies.copy[0][0] in {device for _, device in copies.swap_in}
    assert cache.take_copies().is_empty
    cache.check(one)
