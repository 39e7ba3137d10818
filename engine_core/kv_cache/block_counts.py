"""Numbers of blocks, where there may be several page sizes."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

BlockCounts = int | npt.NDArray[np.int64]
"""Blocks; one number for each pool where there are several."""

PoolSizes = int | tuple[int, ...]
"""`BlockCounts`, as settings have them."""


class PoolIds:
    """Which pool each id belongs to: ids are given out pool by pool.

        id    0      | first_id ...        | ...                 |
              null   |  sizes[0] of pool 0 |  sizes[1] of pool 1 |

    A pool's tensors begin with a null block: an id is index id - first_ids[pool] + 1 there.

    Args:
        sizes: blocks of each pool.
    """

    def __init__(self, sizes: int | Sequence[int], first_id: int = 1) -> None:
        self.sizes = sizes_of(sizes)
        self.num_blocks = sum(self.sizes)
        self.first_ids = [first_id + sum(self.sizes[:pool]) for pool in range(len(self.sizes))]
        self.pool_of = bytes(first_id) + b"".join(
            bytes([pool]) * size for pool, size in enumerate(self.sizes)
        )
        """The pool of each id."""

    def stack(self, pool: int) -> list[int]:
        """All ids of a pool, the first on top."""
        first = self.first_ids[pool]
        return list(range(first + self.sizes[pool] - 1, first - 1, -1))

    def count(self, block_ids: Collection[int]) -> BlockCounts:
        """How many there are, of each pool; a block counts as often as it is named."""
        if len(self.sizes) == 1:
            return len(block_ids)
        return self.by_pool([self.pool_of[block_id] for block_id in block_ids])

    def by_pool(self, pools: Sequence[int], counts: Sequence[int] | None = None) -> BlockCounts:
        """The sum of `counts`, or the number of entries, over the entries of each pool."""
        if len(self.sizes) == 1:
            return len(pools) if counts is None else sum(counts)
        totals = np.zeros(len(self.sizes), np.int64)
        np.add.at(totals, list(pools), 1 if counts is None else list(counts))
        return totals


def sizes_of(num_blocks: int | Sequence[int]) -> tuple[int, ...]:
    """Blocks of each pool."""
    return (num_blocks,) if isinstance(num_blocks, int) else tuple(num_blocks)


def pool_sizes(sizes: Sequence[int]) -> PoolSizes:
    """One number of one pool."""
    return sizes[0] if len(sizes) == 1 else tuple(sizes)


def least_sizes(each: Iterable[PoolSizes]) -> PoolSizes:
    """The least of each pool."""
    return pool_sizes([min(sizes) for sizes in zip(*map(sizes_of, each), strict=True)])


def of_pool(counts: BlockCounts, pool: int) -> int:
    """The number of one pool."""
    return counts if isinstance(counts, int) else int(counts[pool])


def exceeds(wanted: BlockCounts, given: BlockCounts) -> bool:
    """Whether more is wanted than given of any pool."""
    if isinstance(wanted, int) and isinstance(given, int):
        return wanted > given
    return bool(np.any(wanted > given))
