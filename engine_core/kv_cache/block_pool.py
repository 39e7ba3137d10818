"""All physical blocks: reference counts, the free list, and the index from hashes to blocks.

Must not know requests or tokens. A block is in one of three states:

    in use   ref count > 0, not in the free list; findable if it has a hash
    cached   ref count 0, in the free list, findable: brought back to use, or evicted when taken
    empty    ref count 0, in the free list, not findable
"""

from collections.abc import Iterable

from engine_core.kv_cache.free_list import FreeList

NULL_BLOCK_ID = 0
"""Never allocated: stands for blocks that fell out of a sliding window, and for padding."""


class BlockPool:
    """Blocks 1..num_blocks, shared by all groups.

    Args:
        num_blocks: usable blocks; the null block comes on top.
        num_groups: KV-cache groups. The same tokens have other contents in another group, so
            each has an index of its own.

    Raises:
        ValueError: fewer than one block.
    """

    def __init__(self, *, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, it must be at least 1")
        self.num_blocks = num_blocks
        self._free = FreeList(num_blocks)
        self._ref_counts = [0] * (num_blocks + 1)
        self._hashes: list[bytes | None] = [None] * (num_blocks + 1)
        self._group_of = [0] * (num_blocks + 1)
        self._index: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        self._num_cached = 0

    # ------------------------------------------------------------------ numbers

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Of the free blocks, those that are still findable."""
        return self._num_cached

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block_id: int) -> int:
        """How many requests hold the block."""
        return self._ref_counts[block_id]

    # ------------------------------------------------------------------ taking and giving back

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks with one reference each, the longest unused first; cached ones among them
        are no longer findable. The caller has checked `num_free`."""
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._free.pop_front()
            if self._hashes[block_id] is not None:
                self._num_cached -= 1
                self._unindex(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more reference to each of these findable blocks, in use or cached."""
        for block_id in block_ids:
            assert self._hashes[block_id] is not None, f"block {block_id} holds no known prefix"
            if self._ref_counts[block_id] == 0:
                self._free.remove(block_id)
                self._num_cached -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """One reference less to each, in this order: what comes first is evicted first.

        Blocks that nobody could find again are taken before any cached one.
        """
        for block_id in block_ids:
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            assert self._ref_counts[block_id] == 0, f"block {block_id} is released twice"
            if self._hashes[block_id] is None:
                self._free.push_front(block_id)
            else:
                self._num_cached += 1
                self._free.push_back(block_id)

    # ------------------------------------------------------------------ the prefix index

    def find(self, group: int, block_hash: bytes) -> int | None:
        """The block of that group with these contents, if there is one."""
        return self._index[group].get(block_hash)

    def register(self, block_id: int, group: int, block_hash: bytes) -> None:
        """Make a block in use findable. Where another block already has these contents, that one
        stays the one that is found."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
        assert self._hashes[block_id] is None, f"block {block_id} is registered twice"
        if self._index[group].setdefault(block_hash, block_id) == block_id:
            self._hashes[block_id] = block_hash
            self._group_of[block_id] = group

    def forget(self, block_ids: Iterable[int]) -> None:
        """These blocks, all in use, can no longer be found."""
        for block_id in block_ids:
            assert self._ref_counts[block_id] > 0, f"block {block_id} is not in use"
            if self._hashes[block_id] is not None:
                self._unindex(block_id)

    def forget_cached(self) -> int:
        """Empty every cached block. Returns how many there were."""
        cached = [block_id for block_id in self._free if self._hashes[block_id] is not None]
        for block_id in cached:
            self._unindex(block_id)
        self._num_cached = 0
        return len(cached)

    def _unindex(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        del self._index[self._group_of[block_id]][block_hash]
        self._hashes[block_id] = None

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that every block is in exactly one state and that the index is right."""
        free = list(self._free)
        assert len(free) == len(set(free)) == len(self._free)
        assert NULL_BLOCK_ID not in free
        for block_id in range(1, self.num_blocks + 1):
            assert self._ref_counts[block_id] >= 0
            assert (block_id in self._free) == (self._ref_counts[block_id] == 0)
        assert self._ref_counts[NULL_BLOCK_ID] == 0
        assert self._hashes[NULL_BLOCK_ID] is None
        indexed = 0
        for group, index in enumerate(self._index):
            for block_hash, block_id in index.items():
                assert self._hashes[block_id] == block_hash
                assert self._group_of[block_id] == group
                indexed += 1
        assert indexed == sum(block_hash is not None for block_hash in self._hashes)
        assert self._num_cached == sum(self._hashes[block_id] is not None for block_id in free)
