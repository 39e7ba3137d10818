"""The device's blocks: reference counts, the free list, and the index from hashes to blocks."""

import itertools
from array import array
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence, Set

import numpy as np

from engine_core.kv_cache.block_counts import BlockCounts, PoolIds
from engine_core.kv_cache.sequence_blocks import NULL_BLOCK_ID

_EVICTED_A_BLOCK = 4
"""Hashes remembered after eviction, for each block of the pool."""
_MOST_TOGETHER = 16_384
_MOST_ARRAYS = 64
"""They bound what a look-up and an eviction of `EvictedHashes` cost, for any number of blocks."""


class BlockPool:
    """Blocks 1..num_blocks, in a pool for each page size. A block is in one of three states:

        in use   ref count > 0; in the index if it has a hash
        cached   ref count 0, in the index: reused on a hit, or evicted when allocated
        empty    ref count 0, not in the index

    Of each pool empty blocks are a stack; cached ones are in LRU order, and a hit takes one out of
    the middle in O(1). Raises ValueError: a pool without a block, and there are groups.

    Args:
        num_blocks: usable blocks, of each pool if there are several; the null block comes on top.
        num_groups: KV-cache groups. The same tokens have other contents in another group, so
            each has an index of its own.
    """

    def __init__(self, *, num_blocks: int | Sequence[int], num_groups: int = 1) -> None:
        self.ids = PoolIds(num_blocks)
        for size in self.ids.sizes:
            if size < min(1, num_groups):
                raise ValueError(f"num_blocks is {size}, it must be at least 1")
        self.num_blocks = num_blocks = self.ids.num_blocks
        self.num_groups = num_groups
        self.num_references = 0
        """References to all blocks together."""
        self._num_reused = 0
        """Cached blocks that came into use again, or left the index, since the start."""
        self.evicted = EvictedHashes(_EVICTED_A_BLOCK * num_blocks)
        pools = range(len(self.ids.sizes))
        self._empty = [self.ids.stack(pool) for pool in pools]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in pools]
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._group_of = [0] * (num_blocks + 1)
        self._index: list[dict[bytes, int]] = [{} for _ in range(max(1, num_groups))]
        self.touched: set[tuple[int, bytes]] | None = None
        """Keys that came into the index or left it; None: nobody asks."""

    # ------------------------------------------------------------------ numbers

    @property
    def sizes(self) -> BlockCounts:
        """All blocks."""
        return self.num_blocks if len(self.ids.sizes) == 1 else np.array(self.ids.sizes)

    @property
    def free(self) -> BlockCounts:
        """Blocks that can be taken now, cached ones included."""
        if len(self._empty) == 1:
            return len(self._empty[0]) + len(self._cached[0])
        return np.array([len(e) + len(c) for e, c in zip(self._empty, self._cached, strict=True)])

    @property
    def num_free(self) -> int:
        """Free blocks of all pools."""
        return sum(map(len, self._empty)) + sum(map(len, self._cached))

    @property
    def num_free_or_reused(self) -> int:
        """Free blocks, and all that came into use as cached ones or left the index so far."""
        return self.num_free + self._num_reused

    @property
    def num_cached(self) -> int:
        """Free blocks that are in the index."""
        return sum(map(len, self._cached))

    def num_filled(self, pool: int) -> int:
        """Blocks of a pool that are not empty."""
        return self.ids.sizes[pool] - len(self._empty[pool])

    @property
    def cached_blocks(self) -> list[int]:
        """Free blocks in the index."""
        return list(itertools.chain(*self._cached))

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many sequences hold the block; 0 for the null block."""
        return self._ref_counts[block_id]

    # ------------------------------------------------------------------ taking and giving back

    def allocate(self, num_blocks: int, pool: int = 0, avoid: Set[int] = frozenset()) -> list[int]:
        """Take blocks of a pool with one reference each: empty ones, then cached ones, least
        recently used first, which leave the index.

        Args:
            num_blocks: the caller has checked that so many of the pool are free.
            avoid: blocks to leave alone.
        """
        if avoid:
            return self._allocate_avoiding(num_blocks, pool, avoid)
        empty, ref_counts = self._empty[pool], self._ref_counts
        if num_blocks == 1 and empty:
            block_ids = [empty.pop()]
        else:
            num_empty = min(num_blocks, len(empty))
            block_ids = empty[len(empty) - num_empty :]
            del empty[len(empty) - num_empty :]
            block_ids.reverse()
            if num_empty < num_blocks:
                block_ids += self._evict_oldest(num_blocks - num_empty, pool)
        for block_id in block_ids:
            ref_counts[block_id] = 1
        self.num_references += num_blocks
        return block_ids

    def _allocate_avoiding(self, num_blocks: int, pool: int, avoid: Set[int]) -> list[int]:
        empty, cached = self._empty[pool], self._cached[pool]
        block_ids, passed = list[int](), list[int]()
        while empty and len(block_ids) < num_blocks:
            block_id = empty.pop()
            (passed if block_id in avoid else block_ids).append(block_id)
        empty += reversed(passed)
        oldest = (block_id for block_id in cached if block_id not in avoid)
        for block_id in list(itertools.islice(oldest, num_blocks - len(block_ids))):
            del cached[block_id]
            self.evicted.add(self._pop_hash(block_id))
            block_ids.append(block_id)
        assert len(block_ids) == num_blocks, "no free block left; the caller must ask first"
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        self.num_references += num_blocks
        return block_ids

    def in_use_of(self, block_ids: Iterable[int]) -> BlockCounts:
        """How many of these are in use."""
        ref_counts = self._ref_counts
        return self.ids.count([each for each in block_ids if ref_counts[each]])

    def free_of(self, block_ids: Iterable[int]) -> BlockCounts:
        """How many of these are free."""
        ref_counts = self._ref_counts
        return self.ids.count([each for each in block_ids if not ref_counts[each]])

    def share(self, block_ids: Collection[int]) -> None:
        """One more reference to each of these blocks, which are in use or cached."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            if ref_counts[block_id] == 0:
                assert self._hashes[block_id] is not None, f"block {block_id} holds nothing known"
                del self._cached[self.ids.pool_of[block_id]][block_id]
                self._num_reused += 1
            ref_counts[block_id] += 1
        self.num_references += len(block_ids)

    def release(self, block_ids: Collection[int]) -> list[int]:
        """One reference less to each, in this order: what comes first is evicted first.
        Returns those that are cached now."""
        ref_counts, hashes, pool_of = self._ref_counts, self._hashes, self.ids.pool_of
        newly_cached = []
        for block_id in block_ids:
            ref_counts[block_id] = ref_count = ref_counts[block_id] - 1
            assert ref_count >= 0, f"block {block_id} is released twice"
            if ref_count:
                continue
            if hashes[block_id] is None:
                self._empty[pool_of[block_id]].append(block_id)
            else:
                self._cached[pool_of[block_id]][block_id] = None
                newly_cached.append(block_id)
        self.num_references -= len(block_ids)
        return newly_cached

    # ------------------------------------------------------------------ the prefix index

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block of that group with these contents, if there is one."""
        return self._index[group].get(block_hash)

    def finder(self, group: int) -> Callable[[bytes], int | None]:
        """`find` of one group, for a loop."""
        return self._index[group].get

    def hashes_of(self, group: int) -> Iterable[bytes]:
        """Hashes in the index of a group, those that came first first."""
        return self._index[group]

    def num_hashes(self, group: int) -> int:
        return len(self._index[group])

    def hash_of(self, block_id: int) -> bytes | None:
        """None if the block is not in the index."""
        return self._hashes[block_id]

    def group_of(self, block_id: int) -> int:
        """The group of a block in the index."""
        return self._group_of[block_id]

    def register(self, block_id: int, group: int, block_hash: bytes) -> int:
        """Put a block in use into the index, unless another block has the same contents.
        Returns the block in the index now."""
        self.register_run([block_id], group, [block_hash], 0, 1)
        return self._index[group][block_hash]

    def register_run(
        self, table: list[int], group: int, hashes: list[bytes], first: int, stop: int
    ) -> list[int]:
        """`register` for logical blocks first .. stop of a table, in one loop.
        Returns the logical blocks whose contents another block has."""
        known_by, own_hashes, group_of = self._index[group].setdefault, self._hashes, self._group_of
        others, touched = [], self.touched
        for index in range(first, stop):
            block_id = table[index]
            if block_id == NULL_BLOCK_ID:
                continue
            block_hash = hashes[index]
            if known_by(block_hash, block_id) != block_id:
                others.append(index)
            elif own_hashes[block_id] is not block_hash:
                assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
                assert own_hashes[block_id] in (None, block_hash), f"block {block_id} is another"
                own_hashes[block_id] = block_hash
                group_of[block_id] = group
                if touched is not None:
                    touched.add((group, block_hash))
        return others

    def unindex(self, block_ids: Iterable[int]) -> None:
        """Remove these blocks, in use or cached, from the index."""
        for block_id in block_ids:
            if self._hashes[block_id] is not None:
                self._pop_hash(block_id)
                if self._ref_counts[block_id] == 0:
                    pool = self.ids.pool_of[block_id]
                    del self._cached[pool][block_id]
                    self._empty[pool].append(block_id)

    def evict_cached(self) -> int:
        """Evict every cached block. Returns how many there were."""
        num_evicted = self.num_cached
        for pool, (empty, cached) in enumerate(zip(self._empty, self._cached, strict=True)):
            empty += self._evict_oldest(len(cached), pool)
        return num_evicted

    def _evict_oldest(self, num_blocks: int, pool: int) -> list[int]:
        """Take the least recently used cached blocks of a pool out of the index."""
        hashes, group_of, index = self._hashes, self._group_of, self._index
        pop = self._cached[pool].popitem
        assert len(self._cached[pool]) >= num_blocks, (
            "no free block left; the caller must ask first"
        )
        block_ids = [pop(last=False)[0] for _ in range(num_blocks)]
        self._num_reused += num_blocks
        evicted = []
        for block_id in block_ids:
            block_hash = hashes[block_id]
            assert block_hash is not None
            del index[group_of[block_id]][block_hash]
            hashes[block_id] = None
            evicted.append(block_hash)
        if self.touched is not None:
            self.touched.update(zip([group_of[each] for each in block_ids], evicted, strict=True))
        self.evicted.add(*evicted)
        return block_ids

    def _pop_hash(self, block_id: int) -> bytes:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._index[self._group_of[block_id]][block_hash]
        self._hashes[block_id] = None
        self._num_reused += 1
        if self.touched is not None:
            self.touched.add((self._group_of[block_id], block_hash))
        return block_hash

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that every block is in exactly one state and that the index is right."""
        free = [block_id for each in (*self._empty, *self._cached) for block_id in each]
        assert len(free) == len(set(free))
        assert set(free) == {b for b in range(1, self.num_blocks + 1) if not self._ref_counts[b]}
        assert self._ref_counts[NULL_BLOCK_ID] == 0
        assert self._hashes[NULL_BLOCK_ID] is None
        assert self.num_references == sum(self._ref_counts)
        assert all(self._hashes[b] is None for empty in self._empty for b in empty)
        assert all(self._hashes[b] is not None for cached in self._cached for b in cached)
        for pool, blocks in enumerate(zip(self._empty, self._cached, strict=True)):
            assert all(self.ids.pool_of[b] == pool for each in blocks for b in each)
        indexed = 0
        for group, index in enumerate(self._index):
            for block_hash, block_id in index.items():
                assert self._hashes[block_id] == block_hash
                assert self._group_of[block_id] == group
                indexed += 1
        assert indexed == sum(block_hash is not None for block_hash in self._hashes)


class EvictedHashes:
    """The hashes that were evicted last, from device or host: they explain misses of look-ups, and
    decide nothing. `capacity` at most, and never more than a million, of which the oldest eighth
    (or 16,384) is dropped at once.

    64 bits stand for a hash (`hash`, which a bytes object keeps once it was looked up), all but the
    newest in sorted arrays: a tenth of what a dict of the hashes takes, and an explanation is wrong
    once in 2**64 / capacity."""

    def __init__(self, capacity: int) -> None:
        self._num_together = max(1, min(capacity // 8, _MOST_TOGETHER))
        num_arrays = min(capacity // self._num_together, _MOST_ARRAYS) - 1
        self._new: set[int] = set()
        self._old: deque[array[int]] = deque(maxlen=max(0, num_arrays))

    def __contains__(self, block_hash: bytes) -> bool:
        key = hash(block_hash)
        return key in self._new or any(_holds(sorted_keys, key) for sorted_keys in self._old)

    def add(self, *block_hashes: bytes) -> None:
        if len(self._new) + len(block_hashes) > self._num_together:
            self._old.append(array("q", sorted(self._new)))
            self._new = set()
        self._new.update(map(hash, block_hashes))


def _holds(sorted_keys: "array[int]", key: int) -> bool:
    place = bisect_left(sorted_keys, key)
    return place < len(sorted_keys) and sorted_keys[place] == key
