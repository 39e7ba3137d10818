"""What one request holds, and what the cache reads of a request. Knows no pool."""

import dataclasses
from typing import Protocol

from engine_core.kv_cache.block_pool import NULL_BLOCK_ID

BlockIds = tuple[list[int], ...]
"""Physical block ids, one list a group."""


class CachedRequest(Protocol):
    """What the cache reads of a request. `block_hashes` is filled by the cache."""

    request_id: str
    all_token_ids: list[int]
    num_tokens: int
    num_computed_tokens: int
    block_hashes: list[bytes]
    cache_salt: str | None
    adapter: str | None


@dataclasses.dataclass(slots=True)
class HeldBlocks:
    """Position i of a table is logical block i; blocks out of the window are the null block."""

    tables: BlockIds
    num_blocks: int
    """Length of every table."""
    num_findable: int
    """Leading full blocks that were registered or found."""
    num_dropped: list[int]
    """Leading null blocks, a group."""

    @classmethod
    def starting_with(cls, block_ids: BlockIds) -> "HeldBlocks":
        """Tables that begin with a cached prefix, or with nothing."""
        num_blocks = len(block_ids[0])
        return cls(
            tables=tuple(list(table) for table in block_ids),
            num_blocks=num_blocks,
            num_findable=num_blocks,
            num_dropped=[table.count(NULL_BLOCK_ID) for table in block_ids],
        )

    def drop(self, group: int, num_dropped: int) -> list[int]:
        """Make the first `num_dropped` blocks of a group null. Returns those that were real."""
        table, start = self.tables[group], self.num_dropped[group]
        stop = min(num_dropped, self.num_blocks)
        if stop <= start:
            return []
        dropped = table[start:stop]
        table[start:stop] = [NULL_BLOCK_ID] * (stop - start)
        self.num_dropped[group] = stop
        return dropped

    def tail_first(self) -> list[int]:
        """All real blocks, from the last logical block to the first."""
        return [
            table[index]
            for index in range(self.num_blocks - 1, -1, -1)
            for table in self.tables
            if table[index] != NULL_BLOCK_ID
        ]
