"""Sequences that go to host memory as a whole and come back with the same contents."""

from paged_memory import Stream, compute, hit_of, make_cache

from engine_core.kv_cache import AllocStatus


def host_cache(num_blocks=8, num_host_blocks=8, **options):
    return make_cache(num_blocks, num_host_blocks=num_host_blocks, **options)


def can_swap_in(cache, streams, num_reserved_blocks=0, is_alone=True, **options):
    head_room = num_reserved_blocks + (0 if is_alone else cache.watermark_blocks)
    return cache.can_swap_in(streams, head_room=head_room, **options)


def family(cache, num_tokens=6):
    """A parent and a child that share all blocks; the child has then written."""
    parent = Stream("a", list(range(num_tokens)))
    compute(cache, parent)
    parent.tokens.append(7)
    child = Stream("b", [*range(num_tokens), 8], num_tokens)
    cache.fork(parent, child, num_tokens)
    return parent, child


def test_shared_blocks_are_copied_once_and_shared_again():
    """Proves S109, S114, S116, S141, S182, S184."""
    cache = host_cache()
    parent, child = family(cache)
    compute(cache, child)
    mine, theirs = cache.block_ids(parent)[0], cache.block_ids(child)[0]
    assert mine[0] == theirs[0]
    assert cache.swap_out([parent, child]) == 3
    assert (cache.num_blocks_in_use, cache.host.num_pinned) == (0, 3)
    copies = cache.take_copies()
    assert {source for source, _ in copies.swap_out} == {*mine, *theirs}
    assert can_swap_in(cache, [parent, child]) is AllocStatus.OK
    cache.swap_in([parent, child])
    cache.check([parent, child])
    mine, theirs = cache.block_ids(parent)[0], cache.block_ids(child)[0]
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]
    # the head can still be found on the device, the two tails come back
    assert {device for _, device in cache.take_copies().swap_in} == {mine[1], theirs[1]}
    assert cache.host.num_pinned == 0


def test_a_shared_tail_is_still_copied_before_it_is_written():
    cache = host_cache()
    parent, child = family(cache)
    assert cache.swap_out([parent, child]) == 2
    cache.take_copies()
    cache.swap_in([parent, child])
    cache.take_copies()
    assert cache.allocate_slots(child, 1).start == 1
    assert len(cache.take_copies().copy) == 1


def test_only_blocks_with_computed_tokens_are_kept():
    cache = host_cache()
    stream = Stream("a", list(range(6)))
    cache.allocate_slots(stream, 6, 6)
    stream.num_computed_tokens = 6
    assert cache.swap_out([stream]) == 2
    cache.take_copies()
    cache.swap_in([stream])
    assert cache.num_allocated_slots(stream) == 8


def test_without_room_on_the_host_nothing_changes():
    """Proves S115, S117."""
    cache = host_cache(num_host_blocks=1)
    stream = Stream("a", list(range(6)))
    compute(cache, stream)
    before = cache.block_ids(stream)
    assert cache.swap_out([stream]) is None
    assert cache.block_ids(stream) == before
    assert (cache.host.num_pinned, cache.take_copies().is_empty) == (0, True)


def test_what_was_saved_before_is_pinned_and_not_copied():
    cache = host_cache(num_host_blocks=2)
    gone, stream = Stream("a", [1] * 5), Stream("b", [1] * 7)
    compute(cache, gone)
    cache.free(gone)
    cache.take_copies()
    cache.allocate_cached(stream, cache.find_cached_prefix(stream))
    stream.num_computed_tokens = 4
    compute(cache, stream)
    assert cache.swap_out([stream]) == 1
    assert (cache.host.num_pinned, cache.host.num_cached) == (2, 0)
    cache.check()


def test_a_host_block_that_is_pinned_for_the_swap_is_no_room_for_it():
    cache = host_cache(num_host_blocks=2)
    gone, stream = Stream("a", [1] * 5), Stream("b", [1] * 9)
    compute(cache, gone)
    cache.free(gone)
    cache.take_copies()
    compute(cache, stream)
    assert cache.swap_out([stream]) is None
    assert (cache.host.num_pinned, cache.host.num_cached) == (0, 1)


def test_swapped_blocks_are_not_evicted_from_the_host():
    cache = host_cache(num_host_blocks=3)
    stream = Stream("a", list(range(9)))
    compute(cache, stream)
    cache.swap_out([stream])
    cache.take_copies()
    other = Stream("b", [5] * 9)
    compute(cache, other)
    cache.free(other)
    assert cache.take_copies().is_empty
    assert cache.host.num_pinned == 3


def test_a_freed_swapped_sequence_leaves_only_what_can_be_found():
    cache = host_cache(num_blocks=3)
    stream = Stream("a", list(range(9)))
    compute(cache, stream)
    cache.swap_out([stream])
    cache.take_copies()
    cache.free(stream)
    assert (cache.host.num_pinned, cache.host.num_cached) == (0, 2)
    compute(cache, Stream("b", [5] * 12))
    assert hit_of(cache, list(range(9))).num_host_tokens == 8
    cache.free(stream)
    cache.check()


def test_it_cannot_come_back_in_the_step_that_swaps_it_out():
    cache = host_cache()
    stream = Stream("a", list(range(6)))
    compute(cache, stream)
    cache.swap_out([stream])
    assert can_swap_in(cache, [stream]) is AllocStatus.LATER
    cache.take_copies()
    assert can_swap_in(cache, [stream]) is AllocStatus.OK


def test_nothing_is_swapped_into_a_block_that_the_same_step_swaps_out():
    cache = host_cache(num_blocks=2)
    first, second = Stream("a", [1] * 3), Stream("b", [2] * 3)
    for stream in (first, second):
        compute(cache, stream)
    cache.swap_out([first])
    cache.take_copies()
    cache.swap_out([second])  # its block is the next to be taken
    cache.swap_in([first])
    cache.check([first])
    copies = cache.take_copies()
    assert copies.swap_in[0][1] != copies.swap_out[0][0]


def test_can_swap_in_counts_all_tokens_known_now_as_for_a_resumed_request():
    """Proves S117, S135."""
    cache = host_cache(num_blocks=10, watermark=0.1)
    stream = Stream("a", list(range(33)))
    compute(cache, stream, 6)
    cache.swap_out([stream])
    cache.take_copies()
    assert can_swap_in(cache, [stream], is_alone=False) is AllocStatus.OK
    assert can_swap_in(cache, [stream], 1, is_alone=False) is AllocStatus.LATER
    assert can_swap_in(cache, [stream], 1) is AllocStatus.OK
    assert can_swap_in(cache, [stream], 2) is AllocStatus.LATER
    assert can_swap_in(cache, [stream], num_lookahead_slots=7) is AllocStatus.OK
    assert can_swap_in(cache, [stream], num_lookahead_slots=8) is AllocStatus.NEVER
    holder = Stream("b", list(range(5)))
    cache.allocate_cached(holder, cache.find_cached_prefix(holder))
    holder.num_computed_tokens = 4
    compute(cache, holder)
    # of its nine blocks the first is in use; eight are free
    assert can_swap_in(cache, [stream]) is AllocStatus.OK
    assert can_swap_in(cache, [stream], is_alone=False) is AllocStatus.LATER
    compute(cache, Stream("c", [7]))
    assert can_swap_in(cache, [stream]) is AllocStatus.LATER


def test_a_shared_tail_costs_a_block_more():
    cache = host_cache(num_blocks=3)
    parent, child = family(cache)
    cache.swap_out([parent, child])
    cache.take_copies()
    assert can_swap_in(cache, [parent, child]) is AllocStatus.OK
    parent.tokens += [1, 2]
    assert can_swap_in(cache, [parent, child]) is AllocStatus.NEVER


def test_a_tail_that_is_no_tail_to_another_costs_a_block_more():
    """The child writes into a block that its parent only reads."""
    cache = host_cache(num_blocks=3)
    parent = Stream("a", list(range(8)))
    compute(cache, parent)
    child = Stream("b", [*range(6), 9], 6)
    cache.fork(parent, child, 6)
    assert cache.swap_out([parent, child]) == 2
    cache.take_copies()
    assert can_swap_in(cache, [parent, child]) is AllocStatus.OK
    parent.tokens.append(9)
    assert can_swap_in(cache, [parent, child]) is AllocStatus.NEVER


def test_a_tail_that_is_in_use_costs_a_block():
    cache = host_cache(num_blocks=4)
    parent = Stream("a", list(range(8)))
    compute(cache, parent)
    child = Stream("b", [*range(6), 9], 6)
    cache.fork(parent, child, 6)
    cache.swap_out([parent, child])
    cache.take_copies()
    cache.swap_in([parent])
    cache.take_copies()
    assert can_swap_in(cache, [child]) is AllocStatus.OK
    compute(cache, Stream("c", [5] * 5))
    assert can_swap_in(cache, [child]) is AllocStatus.LATER


def test_a_block_written_by_this_steps_copy_is_swapped_out_from_its_source():
    """The host copy is made before the block is, so it must come from where the block does."""
    cache = host_cache()
    parent, child = family(cache)
    (_, tail) = cache.block_ids(parent)[0]
    cache.allocate_slots(child, 1)  # copies the tail; then the child loses its place in the step
    assert cache.swap_out([child]) == 2
    cache.check([parent])
    assert tail in [source for source, _ in cache.take_copies().swap_out]


def test_swapped_in_and_out_in_one_step_needs_no_copy_out():
    cache = host_cache()
    stream = Stream("a", list(range(6)))
    compute(cache, stream)
    cache.swap_out([stream])
    cache.take_copies()
    cache.reset_prefix_cache()
    cache.swap_in([stream])
    assert cache.swap_out([stream]) == 0
    assert cache.take_copies().swap_out == []
    cache.check()


def test_forgetting_a_swapped_sequence_takes_it_from_the_index_but_not_from_its_owner():
    cache = host_cache()
    stream = Stream("a", list(range(9)))
    compute(cache, stream)
    cache.swap_out([stream])
    cache.invalidate(stream, 4)
    cache.take_copies()
    assert hit_of(cache, list(range(9))).num_tokens == 4
    assert can_swap_in(cache, [stream]) is AllocStatus.OK
    cache.swap_in([stream])
    cache.check([stream])
    assert cache.host.num_pinned == 0


def test_without_prefix_caching_every_block_is_copied_both_ways():
    cache = host_cache(enable_prefix_caching=False)
    stream = Stream("a", list(range(9)))
    compute(cache, stream)
    assert cache.swap_out([stream]) == 3
    cache.take_copies()
    assert cache.host.num_cached == 0
    cache.swap_in([stream])
    assert len(cache.take_copies().swap_in) == 3
    cache.check([stream])
