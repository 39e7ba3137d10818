"""The order in which free blocks are taken. Knows ids and their neighbours, nothing else.

A doubly linked ring through two flat lists, because a cached block must be able to leave from the
middle in O(1) when a request finds it again (a deque cannot do that). Id 0, which is no real
block, closes the ring: next[0] is taken first, previous[0] last.

    0 <-> 7 <-> 3 <-> 9 <-> 0        take 7 first
"""

from collections.abc import Iterator

_RING = 0
_NOT_FREE = -1


class FreeList:
    """Holds ids 1..num_blocks; all of them at the start, in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._next: list[int] = [*range(1, num_blocks + 1), _RING]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block_id: int) -> bool:
        return self._next[block_id] != _NOT_FREE

    def __iter__(self) -> Iterator[int]:
        """First to be taken first."""
        block_id = self._next[_RING]
        while block_id != _RING:
            yield block_id
            block_id = self._next[block_id]

    def pop_front(self) -> int:
        """Take the block that has waited longest."""
        block_id = self._next[_RING]
        assert block_id != _RING, "no free block left; the caller must ask first"
        self.remove(block_id)
        return block_id

    def remove(self, block_id: int) -> None:
        """Take this very block."""
        before, after = self._previous[block_id], self._next[block_id]
        assert after != _NOT_FREE, f"block {block_id} is not free"
        self._next[before] = after
        self._previous[after] = before
        self._next[block_id] = _NOT_FREE
        self._num_free -= 1

    def push_back(self, block_id: int) -> None:
        """Give a block back, to be taken last."""
        self._insert(block_id, self._previous[_RING], _RING)

    def push_front(self, block_id: int) -> None:
        """Give a block back, to be taken next."""
        self._insert(block_id, _RING, self._next[_RING])

    def _insert(self, block_id: int, before: int, after: int) -> None:
        assert self._next[block_id] == _NOT_FREE, f"block {block_id} is freed twice"
        self._next[before] = block_id
        self._previous[after] = block_id
        self._previous[block_id] = before
        self._next[block_id] = after
        self._num_free += 1
