"""What layers that look back alike need of the cache, in whole blocks. Arithmetic without state."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table. With a reach of 5 and 4 tokens a block, about to compute
    position 11, which reads 7 8 9 10 and itself:

        | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
          dropped    needed    needed

    A recurrent layer keeps a record a block: its state at the block's start, and rows of the tokens
    (`kernels/interface/recurrence.py`). A token reads its own block, or the one before it: a reach
    of 2. A full block says what the state at its end is, and is never written again.

    Args:
        reach: most tokens that a token looks back on, itself included; None for all.
        is_sparse: of the blocks that a step fills only those need to be written that the next step,
            or another sequence, starts from.
        pool: from which the blocks are, by page size.
        is_encoders: the table is of what a request's encoder made: as long as that is, whole from
            the admission on, and shared by the request's sequences. The last group, if there is
            one.

    Raises:
        ValueError: a reach below 1.
    """

    reach: int | None = None
    is_sparse: bool = False
    pool: int = 0
    is_encoders: bool = False

    def __post_init__(self) -> None:
        if self.reach is not None and self.reach < 1:
            raise ValueError(f"reach is {self.reach}, it must be at least 1; None is all tokens")

    @property
    def keeps_all(self) -> bool:
        """Whether every block is needed until the sequence ends."""
        return self.reach is None

    def num_dropped_blocks(self, position: int, block_size: int) -> int:
        """Leading blocks that neither `position` nor any later one can read."""
        if self.reach is None:
            return 0
        return max(0, position + 1 - self.reach) // block_size

    def next_drop(self, position: int, block_size: int) -> int:
        """The first position behind this one at which one more block is dropped. Not of a group
        that keeps all."""
        assert self.reach is not None
        num_dropped = self.num_dropped_blocks(position, block_size)
        return (num_dropped + 1) * block_size + self.reach - 1

    def num_peak_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks held at once while `num_tokens` are computed, `max_chunk` a step.

        A chunk reads what is within reach before it: reach - 1 + chunk tokens in a row, which touch
        at most one block more than they fill."""
        num_all = -(-num_tokens // block_size)
        if self.reach is None:
            return num_all
        num_span = self.reach - 1 + max_chunk
        return min(num_all, -(-(num_span - 1) // block_size) + 1)
