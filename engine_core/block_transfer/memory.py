"""Blocks in host memory, by hash, within a number of bytes."""

import threading
from collections import OrderedDict

from engine_core.kv_cache.host_pool import HashKey


class BlockMemory:
    """The least recently used blocks give way. For several threads.

    Args:
        block_bytes: of the largest, as which each counts.
    """

    def __init__(self, *, limit_bytes: int, block_bytes: int) -> None:
        self.max_blocks = limit_bytes // block_bytes
        self._blocks: OrderedDict[HashKey, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def put(self, key: HashKey, contents: bytes) -> list[HashKey]:
        """Returns those that gave way."""
        with self._lock:
            self._blocks[key] = contents
            self._blocks.move_to_end(key)
            num_over = max(0, len(self._blocks) - self.max_blocks)
            return [self._blocks.popitem(last=False)[0] for _ in range(num_over)]

    def get(self, key: HashKey) -> bytes | None:
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
            return self._blocks.get(key)

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()

    def delete(self, key: HashKey) -> None:
        with self._lock:
            self._blocks.pop(key, None)
