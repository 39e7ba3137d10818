"""The longest cached prefix that every group can go on from. Reads the pools, changes nothing."""

import dataclasses
from collections.abc import Callable, Sequence

from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.sequence_blocks import NULL_BLOCK_ID, BlockIds

Locate = Callable[[int, bytes], int | None]
"""(group, hash) -> device block, else host block (a larger id), else None."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheHit:
    """`num_tokens` need not be computed again."""

    num_tokens: int
    block_ids: BlockIds
    """Device blocks, a list a group; null where no block is needed or where it is on the host."""
    num_host_tokens: int = 0
    """Of `num_tokens`, those of blocks that must come from the host, in any group."""
    host_blocks: tuple[tuple[int, int, int], ...] = ()
    """(group, logical block, host block)."""


def find_cached_prefix(
    locate: Locate,
    num_device_blocks: int,
    groups: Sequence[KVCacheGroupSpec],
    block_hashes: Sequence[bytes],
    block_size: int,
) -> CacheHit:
    """A full group needs every block before the boundary, a sliding one only those that the window
    at the boundary reads; the leading ones are then the null block.

    Args:
        block_hashes: of the blocks that may be reused, from the first on.
    """
    num_blocks = len(block_hashes)
    for group, spec in enumerate(groups):
        if spec.sliding_window is None:
            num_blocks = _num_leading(locate, group, block_hashes, num_blocks)
    num_blocks = _shrink_to_windows(locate, groups, block_hashes, num_blocks, block_size)
    tables: list[list[int]] = []
    host_blocks: list[tuple[int, int, int]] = []
    for group, spec in enumerate(groups):
        needed = spec.num_prefix_blocks(block_size)
        num_null = 0 if needed is None else max(0, num_blocks - needed)
        table = [NULL_BLOCK_ID] * num_null
        for index in range(num_null, num_blocks):
            block_id = locate(group, block_hashes[index])
            assert block_id is not None
            if block_id > num_device_blocks:
                host_blocks.append((group, index, block_id))
                block_id = NULL_BLOCK_ID
            table.append(block_id)
        tables.append(table)
    num_host_tokens = len({index for _, index, _ in host_blocks}) * block_size
    return CacheHit(num_blocks * block_size, tuple(tables), num_host_tokens, tuple(host_blocks))


def find_on_device(
    find: Callable[[bytes], int | None], block_hashes: Sequence[bytes], block_size: int
) -> CacheHit:
    """The same for one full group without a host: the leading blocks."""
    table: list[int] = []
    for block_hash in block_hashes:
        block_id = find(block_hash)
        if block_id is None:
            break
        table.append(block_id)
    return CacheHit(len(table) * block_size, (table,))


def _num_leading(locate: Locate, group: int, block_hashes: Sequence[bytes], num_blocks: int) -> int:
    for index in range(num_blocks):
        if locate(group, block_hashes[index]) is None:
            return index
    return num_blocks


def _shrink_to_windows(
    locate: Locate,
    groups: Sequence[KVCacheGroupSpec],
    block_hashes: Sequence[bytes],
    num_blocks: int,
    block_size: int,
) -> int:
    """The largest boundary up to `num_blocks` before which every sliding group has its window."""
    settled = False
    while not settled:
        settled = True
        for group, spec in enumerate(groups):
            needed = spec.num_prefix_blocks(block_size)
            if needed is None:
                continue
            for index in range(num_blocks - 1, max(0, num_blocks - needed) - 1, -1):
                if locate(group, block_hashes[index]) is None:
                    # every boundary behind this block, up to here, would need it too
                    num_blocks = index
                    settled = False
                    break
    return num_blocks
