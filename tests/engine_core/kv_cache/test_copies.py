"""Copies of one step that meet in a block."""

from engine_core.kv_cache.copies import PendingCopies


def test_copies_are_handed_over_once():
    pending = PendingCopies()
    pending.add_swap_in(11, 1)
    pending.add_swap_out(2, 12, is_optional=False)
    pending.add_copy(3, 4)
    copies = pending.take()
    assert (copies.swap_in, copies.swap_out, copies.copy) == ([(11, 1)], [(2, 12)], [(3, 4)])
    assert not pending.must_stay
    empty = pending.take()
    pending.add_copy(5, 6)
    assert empty.is_empty


def test_a_block_with_a_new_holder_gets_nothing_of_the_old_one():
    pending = PendingCopies()
    pending.add_swap_in(11, 1)
    pending.add_copy(3, 4)
    pending.on_reallocated([1, 4, 5])
    assert pending.take().is_empty


def test_a_block_that_is_copied_on_keeps_what_it_gets():
    pending = PendingCopies()
    pending.add_copy(1, 2)
    pending.add_copy(2, 3)
    pending.on_reallocated([2])
    assert pending.take().copy == [(1, 2), (2, 3)]


def test_the_origin_is_where_the_contents_are_before_all_copies():
    pending = PendingCopies()
    pending.add_swap_in(11, 1)
    pending.add_copy(1, 2)
    pending.add_copy(5, 6)
    pending.add_copy(6, 7)
    assert [pending.origin(block_id) for block_id in (1, 2, 5, 6, 7, 8)] == [11, 11, 5, 5, 5, 8]


def test_the_origin_of_a_copy_of_what_was_overwritten_since_is_not_known():
    """3 had the contents of 1 before 1 got those of 2."""
    pending = PendingCopies()
    pending.add_copy(1, 3)
    pending.add_copy(2, 1)
    assert pending.origin(3) is None
    assert pending.origin(1) == 2


def test_only_saves_that_are_not_required_are_cancelled():
    pending = PendingCopies()
    pending.add_swap_out(1, 11, is_optional=True)
    pending.add_swap_out(2, 12, is_optional=True)
    pending.require_swap_out(12)
    assert set(pending.being_saved) == {1}
    assert pending.must_stay == {2}
    assert pending.cancel_save(1) == 11
    assert pending.cancel_save(2) is None
    assert pending.take().swap_out == [(2, 12)]
