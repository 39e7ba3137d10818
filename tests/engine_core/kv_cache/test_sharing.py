"""Branches that share blocks, copies before the first write, and equal blocks that become one."""

import pytest
from paged_memory import Stream, compute, hit_of, make_cache


def fork(cache, parent, name, *tokens):
    num_computed = parent.num_computed_tokens
    child = Stream(name, [*parent.tokens[:num_computed], *tokens], num_computed)
    cache.fork(parent, child, num_computed)
    return child


def copies_of(cache, stream, num_tokens=1):
    """The update and the copies of one step."""
    update = cache.allocate_slots(stream, num_tokens)
    stream.num_computed_tokens += num_tokens
    cache.check([stream])
    return update, cache.take_copies().copy


def test_branches_share_all_blocks_until_one_writes():
    """Proves S136, S139, S150, S155, S163, S181."""
    cache = make_cache()
    parent = Stream("a", list(range(6)))
    compute(cache, parent)
    parent.tokens.append(7)
    assert cache.num_allocated_slots(parent) == 8
    children = [fork(cache, parent, name, 8) for name in "bc"]
    (shared, tail) = cache.block_ids(parent)[0]
    assert (cache.num_blocks_in_use, cache.num_shared_references) == (2, 4)
    assert [cache.num_allocated_slots(s) for s in (parent, *children)] == [6, 6, 6]
    assert cache.num_reserved_blocks(parent, 8) == 1

    update, copies = copies_of(cache, children[0])
    own = cache.block_ids(children[0])[0][1]
    assert (update.start, update.block_ids) == (1, ([own],))
    assert copies == [(tail, own)]
    _, copies = copies_of(cache, parent)
    assert copies == [(tail, cache.block_ids(parent)[0][1])]
    # the last one to write has the block to itself
    update, copies = copies_of(cache, children[1])
    assert update.is_empty
    assert copies == []
    assert cache.block_ids(children[1]) == ([shared, tail],)
    assert (cache.num_blocks_in_use, cache.num_shared_references) == (4, 2)
    assert cache.num_allocated_slots(parent) == 8


def test_a_branch_at_a_block_boundary_needs_no_copy():
    cache = make_cache()
    parent = Stream("a", list(range(8)))
    compute(cache, parent)
    child = fork(cache, parent, "b", 9)
    assert cache.num_allocated_slots(child) == 8
    update, copies = copies_of(cache, child)
    assert (update.start, copies) == (2, [])


def test_shared_slots_ahead_are_replaced_without_a_copy():
    cache = make_cache()
    parent = Stream("a", list(range(6)))
    cache.allocate_slots(parent, 6, 6)
    parent.num_computed_tokens = 6
    child = Stream("b", list(range(12)), 6)
    cache.fork(parent, child, 12)
    before = cache.block_ids(child)[0]
    update, copies = copies_of(cache, child, 6)
    after = cache.block_ids(child)[0]
    assert (update.start, update.block_ids) == (1, (after[1:],))
    assert not set(before[1:]) & set(after)
    assert copies == [(before[1], after[1])]


def test_a_block_that_another_filled_is_not_found_once_it_is_written():
    """The child goes on in the middle of a block, in place, after its parent has left."""
    cache = make_cache()
    parent = Stream("a", list(range(9)))
    compute(cache, parent)
    child = Stream("b", [*range(6), 99, 99, 99, 99], 6)
    cache.fork(parent, child, 6)
    assert cache.num_allocated_slots(child) == 6
    cache.free(parent)
    assert hit_of(cache, list(range(9))).num_tokens == 8
    assert cache.num_allocated_slots(child) == 6
    update, copies = copies_of(cache, child, 3)
    assert (update.start, copies) == (2, [])
    assert hit_of(cache, list(range(9))).num_tokens == 4
    assert hit_of(cache, child.tokens).num_tokens == 8
    assert cache.num_allocated_slots(child) == 12


def test_without_room_for_the_copy_nothing_changes():
    cache = make_cache(num_blocks=2)
    parent = Stream("a", list(range(6)))
    compute(cache, parent)
    child = fork(cache, parent, "b", 9)
    before = cache.block_ids(child)
    assert cache.allocate_slots(child, 1) is None
    assert cache.block_ids(child) == before
    assert cache.take_copies().is_empty
    cache.check([parent, child])


def test_a_branch_keeps_what_its_parent_has_hashed():
    """Proves S028, S182."""
    cache = make_cache()
    parent = Stream("a", list(range(10)))
    compute(cache, parent)
    child = fork(cache, parent, "b", 1, 2)
    cache.free(parent)
    assert child.block_hashes == parent.block_hashes[:2]
    copies_of(cache, child, 2)
    assert child.num_hashed_bytes == 4 * 4
    assert hit_of(cache, [*range(10), 1, 2, 0]).num_tokens == 12


def test_a_branch_has_no_hash_of_what_its_parent_computed_behind_it():
    """Proves S028."""
    cache = make_cache()
    parent = Stream("a", list(range(16)))
    compute(cache, parent, 13)
    compute(cache, parent, 3)
    assert len(parent.block_hashes) >= 3
    child = Stream("b", [*range(8), 99], 8)
    cache.fork(parent, child, 8)
    assert child.block_hashes == parent.block_hashes[:2]


@pytest.mark.parametrize("step", [1, 4])
def test_a_block_that_equals_a_known_one_gives_way_to_it(step):
    """Proves S169."""
    cache = make_cache()
    first, second = Stream("a", [1] * 12), Stream("b", [1] * 12)
    compute(cache, first, 3)
    compute(cache, second, 3)
    compute(cache, first, 2 if step == 1 else 5)
    compute(cache, second, 1)
    private = cache.block_ids(second)[0][0]
    update = compute(cache, second, step)
    known = cache.block_ids(first)[0][0]
    assert known != private
    assert update.start == 0
    assert update.block_ids == cache.block_ids(second)
    assert cache.block_ids(second)[0][0] == known
    assert cache.num_deduplicated_blocks == 1
    assert cache.num_blocks_in_use == len({*cache.block_ids(first)[0], *cache.block_ids(second)[0]})
    cache.check([first, second])


def test_a_chunk_keeps_its_own_blocks_until_they_are_computed():
    """Proves S169."""
    cache = make_cache()
    first, second = Stream("a", [1] * 10), Stream("b", [1] * 10)
    for stream in (first, second):
        cache.allocate_slots(stream, 9)
    mine = cache.block_ids(second)[0]
    assert not set(mine) & set(cache.block_ids(first)[0])
    cache.take_copies()
    for stream in (first, second):
        stream.num_computed_tokens = 9
    update = cache.allocate_slots(second, 1)
    assert (update.start, update.block_ids[0][:2]) == (0, cache.block_ids(first)[0][:2])
    assert cache.num_deduplicated_blocks == 2
    assert cache.num_blocks_in_use == 4


def test_an_equal_block_that_is_only_being_computed_is_not_adopted_yet():
    cache = make_cache()
    first, second = Stream("a", [1] * 10), Stream("b", [1] * 10)
    compute(cache, second, 3)
    compute(cache, second, 1)
    cache.allocate_slots(first, 9)
    first.num_computed_tokens = 9
    update = cache.allocate_slots(second, 1)
    assert update.start == 1
    cache.free(first)  # its step does not run
    second.num_computed_tokens = 5
    cache.take_copies()
    compute(cache, second, 4)
    assert cache.num_deduplicated_blocks == 0
    assert hit_of(cache, [1] * 10).num_tokens == 8


def test_a_cached_block_that_is_free_is_adopted_too():
    cache = make_cache()
    gone, stream = Stream("a", [1] * 5), Stream("b", [1] * 5)
    for one in (gone, stream):
        compute(cache, one, 3)
        compute(cache, one, 1)
    known = cache.block_ids(gone)[0][0]
    cache.free(gone)
    assert cache.num_blocks_cached == 1
    compute(cache, stream, 1)
    assert cache.block_ids(stream)[0][0] == known
    assert cache.num_blocks_cached == 0


def test_a_known_block_costs_nothing_that_is_not_given_back_for_it():
    """The own block has another holder, so taking the known one would cost the last free block."""
    cache = make_cache(num_blocks=2)
    gone, stream = Stream("a", [1] * 5), Stream("b", [1] * 5)
    for one in (gone, stream):
        compute(cache, one, 3)
        compute(cache, one, 1)
    fork(cache, stream, "c", 1)
    own = cache.block_ids(stream)[0][0]
    cache.free(gone)
    assert cache.num_blocks_free == 1
    assert compute(cache, stream, 1).start == 1
    assert cache.block_ids(stream)[0][0] == own


def test_a_copied_block_that_fills_alike_gives_way_again():
    cache = make_cache()
    parent = Stream("a", list(range(9)))
    compute(cache, parent, 8)
    child = fork(cache, parent, "b", 9)
    known = cache.block_ids(child)[0][1]
    parent.num_computed_tokens = 6
    copies_of(cache, parent, 2)
    assert cache.block_ids(parent)[0][1] != known
    update, _ = copies_of(cache, parent, 1)
    assert (update.start, update.block_ids[0][0]) == (1, known)


def test_tokens_that_are_computed_and_not_yet_known_are_not_hashed():
    """With a step in flight, the last computed token may not be known."""
    cache = make_cache()
    stream = Stream("a", list(range(7)))
    compute(cache, stream, 7)
    stream.num_computed_tokens = 8
    compute(cache, stream, 1)
    assert len(stream.block_hashes) == 1
    cache.free(stream)
    assert cache.num_blocks_cached == 1


def test_dropped_blocks_are_not_found_and_are_registered_anew():
    cache = make_cache()
    stream = Stream("a", list(range(13)))
    compute(cache, stream)
    cache.invalidate(stream, 6)
    assert hit_of(cache, list(range(13))).num_tokens == 4
    stream.num_computed_tokens = 6
    compute(cache, stream, 7)
    assert hit_of(cache, list(range(13))).num_tokens == 12


def test_without_prefix_caching_equal_blocks_stay_apart():
    """Proves S169, S174."""
    cache = make_cache(enable_prefix_caching=False)
    first, second = Stream("a", [1] * 5), Stream("b", [1] * 5)
    for stream in (first, second):
        for num_tokens in (3, 1, 1):
            compute(cache, stream, num_tokens)
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
