"""Blocks in host memory: pins, the free list, and the index from hashes to blocks."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block_counts import BlockCounts, PoolIds
from engine_core.kv_cache.block_pool import EvictedHashes

HashKey = tuple[int, bytes]
"""(group, hash)."""


class HostPool:
    """Ids follow the device's: first_id .. first_id + num_blocks - 1. A block is in one of three
    states:

        pinned   a swapped sequence needs it, or a copy of this step reads it
        cached   in the index; evicted when no block is empty, least recently used first
        empty

    Args:
        sizes: blocks of each pool, as those of the device.
        evicted: gets the hashes of evicted blocks.

    Raises:
        ValueError: a negative number of blocks.
    """

    def __init__(self, *, first_id: int, sizes: Sequence[int], evicted: EvictedHashes) -> None:
        if min(sizes) < 0:
            raise ValueError(f"num_host_blocks is {min(sizes)}, it must be at least 0")
        self.ids = PoolIds(sizes, first_id)
        self.num_blocks = self.ids.num_blocks
        self._first_id = first_id
        self._evicted = evicted
        pools = range(len(sizes))
        self._empty = [self.ids.stack(pool) for pool in pools]
        self._cached: list[OrderedDict[int, None]] = [OrderedDict() for _ in pools]
        self._pins: Counter[int] = Counter()
        self._read: set[int] = set()
        self._keys: dict[int, HashKey] = {}
        self._index: dict[HashKey, int] = {}
        self.touched: set[HashKey] | None = None
        """Keys that came into the index or left it; None: nobody asks."""

    # ------------------------------------------------------------------ numbers

    @property
    def available(self) -> BlockCounts:
        """Blocks that `take` can give."""
        pools = range(len(self._empty))
        return self.ids.by_pool(pools, [self.num_available(pool) for pool in pools])

    def num_available(self, pool: int) -> int:
        """Blocks of one pool that `take` can give."""
        return len(self._empty[pool]) + len(self._cached[pool])

    @property
    def num_pinned(self) -> int:
        """Blocks that swapped sequences need."""
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        """Blocks in the prefix cache that are not pinned."""
        return sum(map(len, self._cached)) + sum(
            block in self._keys and block not in self._pins for block in self._read
        )

    def available_of(self, blocks: set[int]) -> BlockCounts:
        """How many of these could be taken."""
        return self.ids.count([block for block in blocks if block in self._cached_of(block)])

    def _cached_of(self, block: int) -> OrderedDict[int, None]:
        """The cached blocks of its pool."""
        return self._cached[self.ids.pool_of[block]]

    # ------------------------------------------------------------------ taking and giving back

    def take(self, pool: int) -> int:
        """An empty block, else the least recently used cached one. Register or pin it before taking
        the next. The caller has checked `num_available`."""
        if self._empty[pool]:
            return self._empty[pool].pop()
        block = self._cached[pool].popitem(last=False)[0]
        self._evicted.add(self._pop_key(block))
        return block

    def pin(self, block: int) -> None:
        """Keep the block until `unpin`."""
        self._pins[block] += 1
        self._cached_of(block).pop(block, None)

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            self._settle(block)

    def is_pinned(self, block: int) -> bool:
        return block in self._pins

    def begin_read(self, block: int) -> None:
        """A copy of this step reads the block: keep it until `end_reads`."""
        self._read.add(block)
        self._cached_of(block).pop(block, None)

    def end_reads(self) -> None:
        """The step's copies have been issued."""
        blocks, self._read = self._read, set()
        for block in sorted(blocks):
            self._settle(block)

    def _settle(self, block: int) -> None:
        if block in self._pins or block in self._read:
            return
        if block in self._keys:
            self._cached_of(block)[block] = None
        else:
            self._empty[self.ids.pool_of[block]].append(block)

    # ------------------------------------------------------------------ the index

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block with these contents, if there is one."""
        return self._index.get((group, block_hash))

    def hashes_of(self, group: int) -> Iterable[bytes]:
        """Hashes in the index of a group, those that came first first."""
        return (block_hash for of_group, block_hash in self._index if of_group == group)

    @property
    def num_hashes(self) -> int:
        """Hashes in the index, of all groups."""
        return len(self._index)

    def key_of(self, block: int) -> HashKey | None:
        """Its place in the index, if it is there."""
        return self._keys.get(block)

    def register(self, block: int, group: int, block_hash: bytes) -> None:
        """Put a taken block into the index; no other has these contents."""
        key = (group, block_hash)
        assert key not in self._index, f"two host blocks for one hash, {block} is the second"
        self._index[key] = block
        self._keys[block] = key
        if self.touched is not None:
            self.touched.add(key)
        self._settle(block)

    def touch(self, block: int) -> None:
        """Mark the block as used now."""
        if block in self._cached_of(block):
            self._cached_of(block).move_to_end(block)

    def unindex(self, block: int) -> None:
        """Remove the block from the index."""
        if block in self._keys:
            self._pop_key(block)
            if block in self._cached_of(block):
                del self._cached_of(block)[block]
                self._empty[self.ids.pool_of[block]].append(block)

    def evict_cached(self) -> list[int]:
        """Evict every block that is not pinned. Returns them."""
        blocks = [block for block in self._keys if block not in self._pins]
        for block in blocks:
            self._evicted.add(self._keys[block][1])
            self.unindex(block)
        return blocks

    def _pop_key(self, block: int) -> bytes:
        key = self._keys.pop(block)
        del self._index[key]
        if self.touched is not None:
            self.touched.add(key)
        return key[1]

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that every block is in exactly one state and that the index is right."""
        idle = [block for each in (*self._empty, *self._cached) for block in each]
        kept = set(self._pins) | self._read
        assert len(idle) == len(set(idle))
        assert not kept & set(idle)
        assert kept | set(idle) == set(range(self._first_id, self._first_id + self.num_blocks))
        assert all(count > 0 for count in self._pins.values())
        assert all(block in self._keys for cached in self._cached for block in cached)
        assert not any(block in self._keys for empty in self._empty for block in empty)
        assert self._index == {key: block for block, key in self._keys.items()}

    def check_pins(self, pins: Counter[int]) -> None:
        """Assert that the pins are these."""
        assert self._pins == pins
