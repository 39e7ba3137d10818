"""The longest cached prefix that every group can go on from. Reads the pool, changes nothing."""

import dataclasses
from collections.abc import Sequence

from engine_core.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from engine_core.kv_cache.groups import KVCacheGroupSpec


@dataclasses.dataclass(frozen=True, slots=True)
class CacheHit:
    """`num_tokens` need not be computed again; `block_ids` holds them, a list a group."""

    num_tokens: int
    block_ids: tuple[list[int], ...]


def find_cached_prefix(
    pool: BlockPool,
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
            num_blocks = _num_leading(pool, group, block_hashes[:num_blocks])
    num_blocks = _shrink_to_windows(pool, groups, block_hashes, num_blocks, block_size)
    block_ids = tuple(
        _blocks_of(pool, group, spec, block_hashes[:num_blocks], block_size)
        for group, spec in enumerate(groups)
    )
    return CacheHit(num_blocks * block_size, block_ids)


def _num_leading(pool: BlockPool, group: int, block_hashes: Sequence[bytes]) -> int:
    for index, block_hash in enumerate(block_hashes):
        if pool.find(group, block_hash) is None:
            return index
    return len(block_hashes)


def _shrink_to_windows(
    pool: BlockPool,
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
                if pool.find(group, block_hashes[index]) is None:
                    # every boundary behind this block, up to here, would need it too
                    num_blocks = index
                    settled = False
                    break
    return num_blocks


def _blocks_of(
    pool: BlockPool,
    group: int,
    spec: KVCacheGroupSpec,
    block_hashes: Sequence[bytes],
    block_size: int,
) -> list[int]:
    needed = spec.num_prefix_blocks(block_size)
    num_null = 0 if needed is None else max(0, len(block_hashes) - needed)
    block_ids = [NULL_BLOCK_ID] * num_null
    for block_hash in block_hashes[num_null:]:
        block_id = pool.find(group, block_hash)
        assert block_id is not None
        block_ids.append(block_id)
    return block_ids
