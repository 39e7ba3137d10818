"""Any order of what a scheduler may do: every slot that a sequence reads holds its own prefix."""

import dataclasses

import hypothesis.strategies as st
from cache_driving import CacheDriver
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_memory import Stream

from engine_core.kv_cache import AllocStatus, KVCacheGroupSpec
from tests.profiles import examples

FULL = KVCacheGroupSpec()
STATE = KVCacheGroupSpec(2, is_sparse=True)
LAYOUTS = [
    (FULL,),
    (FULL,),
    (KVCacheGroupSpec(3),),
    (FULL, KVCacheGroupSpec(5)),
    (KVCacheGroupSpec(2), FULL, FULL),
    (FULL, STATE),
    (FULL, KVCacheGroupSpec(4, pool=1), dataclasses.replace(STATE, pool=1)),
    (STATE,),
]


TOKEN = st.sampled_from([0, 0, 0, 1])
"""Mostly alike, so that there is much to share."""


def keys(joined):
    return set(memoryview(joined).cast("Q"))


class CacheMachine(CacheDriver, RuleBasedStateMachine):
    """`running` holds device blocks, `swapped` host blocks, `waiting` nothing."""

    @initialize(
        num_blocks=st.integers(4, 24),
        num_host_blocks=st.sampled_from([0, 1, 3, 8, 30]),
        block_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from(LAYOUTS),
        caching=st.sampled_from([True, True, True, False]),
        lengths=st.lists(st.integers(1, 14), max_size=4),
        interval=st.sampled_from([0, 2, 4]),
    )
    def start(self, **options):
        self.begin(**options)

    def begin(self, *, num_blocks, num_host_blocks, groups, **options):
        if any(spec.pool for spec in groups):
            num_blocks = [num_blocks, num_blocks // 2 + 2]
            num_host_blocks = [num_host_blocks, -(-num_host_blocks // 2)]
        super().begin(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, groups=groups, **options
        )
        self.told = set()
        """What a follower of the changes knows, as keys."""
        self._follow(self.cache.changes.whole())
        self.cache.changes.start()

    def _follow(self, change):
        if change is None:
            return
        self.told = (set() if change.is_whole else self.told - keys(change.removed)) | keys(
            change.stored
        )
        assert not keys(change.stored) & keys(change.removed)

    # ------------------------------------------------------------------ drawing

    def _some(self, data, names, at_most=3):
        return data.draw(
            st.lists(st.sampled_from(sorted(names)), min_size=1, max_size=at_most, unique=True)
        )

    # ------------------------------------------------------------------ a plan

    @precondition(lambda self: not self.has_preempted)
    @rule(
        num_tokens=st.integers(1, 14),
        last_token=TOKEN,
        salt=st.sampled_from([None, None, None, "x"]),
        chunk=st.integers(1, 9),
        lookahead=st.integers(0, 2),
    )
    def arrive(self, num_tokens, last_token, salt, chunk, lookahead):
        self._arrive([*[0] * (num_tokens - 1), last_token], salt, chunk, lookahead)

    @precondition(lambda self: self.waiting and not self.has_preempted)
    @rule(data=st.data(), chunk=st.integers(1, 9), lookahead=st.integers(0, 2))
    def admit(self, data, chunk, lookahead):
        self._admit(data.draw(st.sampled_from(sorted(self.waiting))), chunk, lookahead)

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), chunk=st.integers(1, 6), lookahead=st.integers(0, 2))
    def run(self, data, chunk, lookahead):
        for name in self._some(data, self._idle(), 9):
            stream = self.running[name]
            left = stream.num_tokens - stream.num_computed_tokens
            self._grow(stream, min(left, chunk), lookahead)

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), drafts=st.lists(TOKEN, min_size=1, max_size=4))
    def run_with_drafts(self, data, drafts):
        stream = self.running[data.draw(st.sampled_from(sorted(self._idle())))]
        left = stream.num_tokens - stream.num_computed_tokens
        self._grow(stream, left + len(drafts), 0, drafts)

    # ------------------------------------------------------------------ leaving

    @precondition(lambda self: self._victims())
    @rule(data=st.data())
    def preempt(self, data):
        name = data.draw(st.sampled_from(sorted(self._victims())))
        self._refund(name)
        self._recompute(name)

    @precondition(lambda self: self._victims())
    @rule(data=st.data())
    def swap_out(self, data):
        names = self._some(data, self._victims())
        for name in names:
            self._refund(name)
        streams = [self.running[name] for name in names]
        before = self._state()
        if self.cache.swap_out(streams) is None:
            assert self._state() == before
            for name in names:
                self._recompute(name)
            return
        for name in names:
            self.swapped[name] = self.running.pop(name)
            del self.tables[name]
        self.has_preempted = True

    @precondition(lambda self: self.swapped)
    @rule(data=st.data(), lookahead=st.integers(0, 2))
    def swap_in(self, data, lookahead):
        names = self._some(data, self.swapped)
        streams = [self.swapped[name] for name in names]
        head_room = self.cache.watermark_blocks if self.running else 0
        status = self.cache.can_swap_in(streams, head_room=head_room, num_lookahead_slots=lookahead)
        if status is not AllocStatus.OK:
            return
        self.cache.swap_in(streams)
        for name, stream in zip(names, streams, strict=True):
            self.running[name] = self.swapped.pop(name)
            self.tables[name] = [list(table) for table in self.cache.block_ids(stream)]
        for stream in streams:
            left = stream.num_tokens - stream.num_computed_tokens
            assert self._grow(stream, left, lookahead), "can_swap_in said that there is room"

    @precondition(lambda self: self._idle() or self.swapped)
    @rule(data=st.data())
    def finish(self, data):
        name = data.draw(st.sampled_from(sorted([*self._idle(), *self.swapped])))
        stream = self.running.pop(name, None) or self.swapped.pop(name)
        self.tables.pop(name, None)
        self.cache.free(stream)

    # ------------------------------------------------------------------ sharing and forgetting

    @precondition(lambda self: self._idle())
    @rule(data=st.data(), token=TOKEN)
    def fork(self, data, token):
        parent = self.running[data.draw(st.sampled_from(sorted(self._idle())))]
        name = self._name()
        num_computed = parent.num_computed_tokens
        if not self.cache.has_windows:
            num_computed = data.draw(st.integers(0, num_computed))
        child = Stream(
            name,
            [*parent.tokens[:num_computed], token],
            num_computed,
            cache_salt=parent.cache_salt,
        )
        self.cache.fork(parent, child, num_computed)
        self.running[name] = child
        self.was_resumed.add(name)
        self.tables[name] = [list(table) for table in self.cache.block_ids(child)]

    @precondition(lambda self: self._idle() and not (self.plan or self.has_preempted))
    @rule(data=st.data())
    def forget(self, data):
        """What only this sequence holds turns out to be rubbish, from a token on."""
        stream = self.running[data.draw(st.sampled_from(sorted(self._idle())))]
        first = data.draw(st.integers(0, stream.num_computed_tokens))
        for spec in self.cache.groups:
            if not spec.keeps_all and first < stream.num_computed_tokens:
                return  # what was dropped cannot be computed again in place
        pool = self.cache._pool
        self.cache.invalidate(stream, first)
        size = self.cache.block_size
        for table in self.cache.block_ids(stream):
            for index in range(first // size, len(table)):
                if pool.ref_count(table[index]) == 1:
                    for slot in range(max(0, first - index * size), size):
                        self.memory.blocks[table[index]][slot] = -1
        stream.num_computed_tokens = first

    @rule()
    def tell_changes(self):
        changes = self.cache.changes
        self._follow(changes.take())
        assert self.told == keys(changes.whole().stored)
        assert changes.take() is None

    @rule()
    def reset(self):
        self.cache.reset_prefix_cache()
        assert self.cache.num_blocks_cached == self.cache.num_disk_blocks == 0

    # ------------------------------------------------------------------ the step

    @precondition(lambda self: self.plan or self.has_preempted or self.has_staged)
    @rule(swap_out_first=st.booleans(), data=st.data())
    def step(self, swap_out_first, data):
        self._run_plan(swap_out_first)
        for planned in self.plan.values():
            stream = planned.stream
            if planned.drafts:
                num_accepted = data.draw(st.integers(0, len(planned.drafts)))
                stream.tokens += planned.drafts[:num_accepted]
                stream.num_computed_tokens -= len(planned.drafts) - num_accepted
            if stream.num_computed_tokens == stream.num_tokens:
                stream.tokens.append(data.draw(TOKEN))
        self.plan = {}
        self.has_admitted = self.has_preempted = self.has_staged = False
        self._check_contents()

    # ------------------------------------------------------------------ always

    @invariant()
    def holds_together(self):
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        cache.check(self.running.values())
        assert cache.num_blocks_in_use + cache.num_blocks_free == cache.num_blocks
        for name, stream in self.running.items():
            for mine, theirs in zip(self.tables[name], cache.block_ids(stream), strict=True):
                # dropped blocks are in no update
                assert all(b in (a, 0) for a, b in zip(mine, theirs, strict=True))
        if not self.running:
            assert cache.num_blocks_in_use == cache.num_shared_references == 0
        if not self.swapped:
            assert cache.host.num_pinned == 0


class DiskCacheMachine(CacheMachine):
    """With blocks on disk, which answers late and loses some."""

    @initialize(
        num_blocks=st.integers(4, 24),
        num_host_blocks=st.sampled_from([0, 0, 3]),
        block_size=st.sampled_from([1, 2, 4]),
        groups=st.sampled_from(LAYOUTS),
        disk_blocks=st.sampled_from([1, 4, 30, 30]),
    )
    def start(self, **options):
        self.begin(caching=True, lengths=[], interval=4, **options)

    @precondition(lambda self: self.disk_events)
    @rule()
    def finish_all_on_disk(self):
        for event in list(self.disk_events):
            self._finish_on_disk(event, is_lost=False)

    @precondition(lambda self: self.disk_events)
    @rule(data=st.data(), is_lost=st.booleans())
    def finish_some_on_disk(self, data, is_lost):
        for event in data.draw(st.lists(st.sampled_from(self.disk_events), unique=True)):
            self._finish_on_disk(event, is_lost=is_lost)

    @precondition(lambda self: self.on_disk)
    @rule(data=st.data())
    def evict_from_disk(self, data):
        keys = data.draw(st.lists(st.sampled_from(sorted(self.on_disk)), unique=True))
        for key in keys:
            del self.on_disk[key]
        self.disk.on_gone(keys)

    @precondition(lambda self: not (self.plan or self.has_preempted or self.has_admitted))
    @rule(
        num_tokens=st.integers(2, 14),
        last_token=TOKEN,
        salt=st.sampled_from([None, None, "x"]),
        chunk=st.integers(1, 9),
    )
    def find_on_disk(self, num_tokens, last_token, salt, chunk):
        """What was computed is written and leaves the memory; then a prompt comes."""
        for _ in range(2):
            self._run_plan(swap_out_first=False)
            self.finish_all_on_disk()
        self.cache.evict_cached()
        self._arrive([*[0] * (num_tokens - 1), last_token], salt, chunk, 0)
        if self.has_staged:
            self._run_plan(swap_out_first=False)
            self.finish_all_on_disk()
            self._admit(next(reversed(self.waiting)), chunk, 0)


TestDiskCacheMachine = DiskCacheMachine.TestCase
TestDiskCacheMachine.settings = settings(
    max_examples=examples(150), stateful_step_count=50, deadline=None
)

TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
