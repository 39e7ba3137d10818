"""The pool as cells with owners, for those who watch. All in arrays: a pool may have a million
blocks."""

from collections.abc import Collection, Sequence
from itertools import chain

import numpy as np

from protocol.snapshots import CACHED, EMPTY, FIRST_PREFIX, MAX_CELLS, MAX_PREFIXES, BlockMap

_FEWEST_BLOCKS = 256


def block_map(
    num_blocks: int, cached: Collection[int], holders: Sequence[tuple[int, list[int]]]
) -> BlockMap:
    """
    Args:
        num_blocks: ids 1 to num_blocks.
        cached: free blocks in the prefix cache.
        holders: owner and blocks of each sequence, the first of them where its prompt begins: by
            that block shared prefixes are told apart.
    """
    owners = np.full(num_blocks + 1, EMPTY, np.uint16)
    owners[np.fromiter(cached, np.int64, len(cached))] = CACHED
    holders = [holder for holder in holders if holder[1]]
    prefixes: list[tuple[int, int]] = []
    if holders:
        lengths = [len(blocks) for _, blocks in holders]
        held = np.fromiter(chain.from_iterable(blocks for _, blocks in holders), np.int64)
        owners[held] = np.repeat(np.array([owner for owner, _ in holders], np.uint16), lengths)
        num_holders = np.bincount(held, minlength=num_blocks + 1)
        is_shared = num_holders[held] > 1
        if is_shared.any():
            heads = np.repeat([blocks[0] for _, blocks in holders], lengths)[is_shared]
            known, prefix_of = np.unique(heads, return_inverse=True)
            owners[held[is_shared]] = FIRST_PREFIX + np.minimum(prefix_of, MAX_PREFIXES - 1)
            sizes = np.bincount(owners)[FIRST_PREFIX:]
            prefixes = list(zip(num_holders[known].tolist(), sizes.tolist(), strict=False))
    last = int(np.flatnonzero(owners).max(initial=0))
    num_shown = min(num_blocks, max(_FEWEST_BLOCKS, 1 << (last - 1).bit_length()))
    per_cell = -(-num_shown // MAX_CELLS) or 1
    num_cells = -(-num_shown // per_cell)
    padded = np.full(num_cells * per_cell, EMPTY, np.uint16)
    padded[:num_shown] = owners[1 : num_shown + 1]
    cells = padded.reshape(num_cells, per_cell)
    levels = np.count_nonzero(cells != EMPTY, axis=1) * 255 // per_cell
    return BlockMap(
        blocks_per_cell=per_cell,
        owners=cells.max(axis=1, initial=EMPTY).astype("<u2").tobytes(),
        levels=levels.astype(np.uint8).tobytes(),
        prefixes=prefixes,
    )
