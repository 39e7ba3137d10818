"""Reference counts, eviction order and the index, alone and against a plain model."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.kv_cache import NULL_BLOCK_ID, BlockPool
from tests.profiles import examples


def cached(pool, names):
    """Blocks registered under these names and released, in this order."""
    block_ids = pool.allocate(len(names))
    for block_id, name in zip(block_ids, names, strict=True):
        pool.register(block_id, 0, name)
        pool.release([block_id])
    return block_ids


def test_block_ids_start_at_one_and_the_null_block_is_never_given_out():
    """Proves S148, S154."""
    pool = BlockPool(num_blocks=3)
    assert pool.allocate(3) == [1, 2, 3]
    assert NULL_BLOCK_ID == 0
    assert (pool.num_free, pool.num_in_use) == (0, 3)
    pool.check()


def test_empty_blocks_are_taken_before_cached_ones_and_the_longest_unused_first():
    """Proves S164, S165, S166."""
    pool = BlockPool(num_blocks=4)
    first, second = cached(pool, [b"first", b"second"])
    assert pool.num_cached == 2
    pool.allocate(2)
    assert (pool.find(0, b"first"), pool.find(0, b"second")) == (first, second)
    assert pool.allocate(1) == [first]
    assert pool.find(0, b"first") is None
    assert pool.find(0, b"second") == second
    pool.check()


def test_a_shared_block_is_used_again_and_outlives_what_was_released_before_it():
    pool = BlockPool(num_blocks=2)
    first, second = cached(pool, [b"first", b"second"])
    pool.share([first])
    assert (pool.ref_count(first), pool.num_cached) == (1, 1)
    pool.release([first])
    assert pool.allocate(2) == [second, first]
    pool.check()


def test_a_block_held_twice_stays_until_both_let_go():
    """Proves S154."""
    pool = BlockPool(num_blocks=2)
    (block_id,) = pool.allocate(1)
    pool.register(block_id, 0, b"x")
    pool.share([block_id])
    pool.release([block_id])
    assert pool.num_in_use == 1
    pool.release([block_id])
    assert (pool.num_in_use, pool.num_cached) == (0, 1)
    pool.check()


def test_the_first_block_with_given_contents_stays_the_one_that_is_found():
    pool = BlockPool(num_blocks=3, num_groups=2)
    one, two, other_group = pool.allocate(3)
    pool.register(one, 0, b"x")
    pool.register(two, 0, b"x")
    pool.register(other_group, 1, b"x")
    assert (pool.find(0, b"x"), pool.find(1, b"x")) == (one, other_group)
    pool.release([two])
    assert pool.num_cached == 0
    pool.check()


def test_releasing_or_allocating_too_much_is_our_bug():
    pool = BlockPool(num_blocks=1)
    (block_id,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate(1)
    pool.release([block_id])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([block_id])


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(num_blocks=0)


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a counter, a dict, and a list in order of release."""

    @initialize(num_blocks=st.integers(1, 12), num_groups=st.integers(1, 2))
    def start(self, num_blocks, num_groups):
        self.pool = BlockPool(num_blocks=num_blocks, num_groups=num_groups)
        self.num_blocks, self.num_groups = num_blocks, num_groups
        self.refs: Counter[int] = Counter()
        self.names: dict[int, tuple[int, bytes]] = {}
        self.order: list[int] = []  # cached free blocks, first to be evicted first

    @rule(wanted=st.integers(0, 5))
    def allocate(self, wanted):
        count = min(wanted, self.pool.num_free)
        num_empty = self.pool.num_free - self.pool.num_cached
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count
        assert not any(self.refs[block_id] for block_id in block_ids)
        evicted = [block_id for block_id in block_ids if block_id in self.names]
        assert all(self.names[block_id][1] in self.pool.evicted for block_id in evicted)
        assert evicted == self.order[: max(0, count - num_empty)]
        self.order = self.order[len(evicted) :]
        for block_id in block_ids:
            self.names.pop(block_id, None)
            self.refs[block_id] = 1

    @rule(wanted=st.integers(0, 5), avoid=st.sets(st.integers(1, 12), min_size=1))
    def allocate_avoiding(self, wanted, avoid):
        free = {b for b in range(1, self.num_blocks + 1) if not self.refs[b]}
        block_ids = self.pool.allocate(min(wanted, len(free - avoid)), avoid=avoid)
        assert set(block_ids) <= free - avoid
        empty = {b for b in free - avoid if b not in self.names}
        cached = [b for b in self.order if b not in avoid]
        assert [b for b in block_ids if b in self.names] == cached[
            : max(0, len(block_ids) - len(empty))
        ]
        for block_id in block_ids:
            if self.names.pop(block_id, None):
                self.order.remove(block_id)
            self.refs[block_id] = 1

    def _in_use(self):
        return sorted(block_id for block_id, count in self.refs.items() if count)

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def release(self, data):
        block_ids = data.draw(st.lists(st.sampled_from(self._in_use()), unique=True))
        newly_cached = self.pool.release(block_ids)
        before = len(self.order)
        for block_id in block_ids:
            self.refs[block_id] -= 1
            if not self.refs[block_id] and block_id in self.names:
                self.order.append(block_id)
        assert newly_cached == self.order[before:]

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data(), content=st.integers(0, 7))
    def register(self, data, content):
        group = data.draw(st.integers(0, self.num_groups - 1))
        block_id = data.draw(st.sampled_from(self._in_use()))
        name = (group, bytes([content]))
        if block_id in self.names:
            return
        known = [b for b, other in self.names.items() if other == name]
        assert self.pool.register(block_id, *name) == (known or [block_id])[0]
        if name not in self.names.values():
            self.names[block_id] = name

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def share(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.names)))
        self.pool.share([block_id])
        if not self.refs[block_id]:
            self.order.remove(block_id)
        self.refs[block_id] += 1

    @precondition(lambda self: any(self.refs.values()))
    @rule(data=st.data())
    def forget(self, data):
        block_id = data.draw(st.sampled_from(self._in_use()))
        self.pool.unindex([block_id])
        self.names.pop(block_id, None)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def forget_a_cached_one(self, data):
        block_id = data.draw(st.sampled_from(self.order))
        self.pool.unindex([block_id])
        del self.names[block_id]
        self.order.remove(block_id)

    @rule()
    def evict_cached(self):
        assert self.pool.evict_cached() == len(self.order)
        for block_id in self.order:
            del self.names[block_id]
        self.order = []

    @invariant()
    def is_the_model(self):
        self.pool.check()
        assert self.pool.num_cached == len(self.order)
        assert self.pool.num_in_use == len(self._in_use())
        assert self.pool.num_references == self.refs.total()
        for block_id in range(1, self.num_blocks + 1):
            assert self.pool.ref_count(block_id) == self.refs[block_id]
        for group in range(self.num_groups):
            for content in range(8):
                holders = [b for b, name in self.names.items() if name == (group, bytes([content]))]
                assert self.pool.find(group, bytes([content])) == (holders[0] if holders else None)


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
