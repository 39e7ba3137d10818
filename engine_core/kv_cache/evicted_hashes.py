"""Hashes evicted lately, in bounded memory: explains misses of look-ups, decides nothing."""

from array import array
from bisect import bisect_left
from collections import deque

_MOST_TOGETHER = 16_384
_MOST_ARRAYS = 64
"""What a look-up and an eviction cost is bounded, however many blocks there are."""


class EvictedHashes:
    """The hashes that were evicted last, from device or host: `capacity` at most, and never more
    than a million, of which the oldest eighth (or 16,384) is dropped at once.

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
