"""What layers that look back alike need of the cache, in whole blocks. Arithmetic without state."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table. With a reach of 5 and 4 tokens a block, about to compute
    position 11, which reads 7 8 9 10 and itself:

        | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
          dropped    needed    needed

    A recurrent state is a reach of 2 that cannot go back: a block holds the state behind the last
    of its tokens that is computed, so a full block holds that at its end. A step's kernel starts
    from the block of the token before its first, and writes each block that its tokens touch.

        computed 16   [0 0 0 8]      one block holds the state
        computed 17   [0 0 0 8 10]   the new block is written, the last one was read
        computed 18   [0 0 0 0 10]   the last one is dropped, and stays in the prefix cache

    Args:
        reach: most tokens that a token looks back on, itself included; None for all.
        goes_back: whether a token may be computed again while those behind it are there.
        pool: from which the blocks are, by page size.
        span: a block has the tokens of so many of the cache's blocks.
        is_encoders: the table is of what a request's encoder made: as long as that is, whole from
            the admission on, and shared by the request's sequences. The last group, if there is
            one.

    Raises:
        ValueError: a reach or a span below 1.
    """

    reach: int | None = None
    goes_back: bool = True
    pool: int = 0
    span: int = 1
    is_encoders: bool = False

    def __post_init__(self) -> None:
        if self.reach is not None and self.reach < 1:
            raise ValueError(f"reach is {self.reach}, it must be at least 1; None is all tokens")
        if self.span < 1:
            raise ValueError(f"span is {self.span}, it must be at least 1")

    @property
    def keeps_all(self) -> bool:
        """Whether every block is needed until the sequence ends."""
        return self.reach is None

    # Arguments are positions and the cache's blocks, results are in the group's own.

    def length(self, num_blocks: int) -> int:
        """Blocks that hold so many of the cache's, the last in part."""
        return -(-num_blocks // self.span)

    def last_of(self, index: int) -> int:
        """The last of the cache's blocks in one of the group's, whose hash that one has."""
        return (index + 1) * self.span - 1

    def num_dropped_blocks(self, position: int, block_size: int) -> int:
        """Leading blocks that neither `position` nor any later one can read."""
        if self.reach is None:
            return 0
        return max(0, position + 1 - self.reach) // (block_size * self.span)

    def next_drop(self, position: int, block_size: int) -> int:
        """The first position behind this one at which one more block is dropped. Not of a group
        that keeps all."""
        assert self.reach is not None
        num_dropped = self.num_dropped_blocks(position, block_size)
        return (num_dropped + 1) * block_size * self.span + self.reach - 1

    def num_peak_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks held at once while `num_tokens` are computed, `max_chunk` a step.

        A chunk reads what is within reach before it: reach - 1 + chunk tokens in a row, which touch
        at most one block more than they fill."""
        size = block_size * self.span
        num_all = -(-num_tokens // size)
        if self.reach is None:
            return num_all
        num_span = self.reach - 1 + max_chunk
        return min(num_all, -(-(num_span - 1) // size) + 1)
