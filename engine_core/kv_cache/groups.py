"""What layers that attend alike need of the cache, in whole blocks. Arithmetic without state."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table. With window 5 and 4 tokens a block, about to compute
    position 11, which reads 7 8 9 10 and itself:

        | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
          dropped    needed    needed

    Args:
        sliding_window: most tokens that a token attends to, itself included; None for all.

    Raises:
        ValueError: a window below 1.
    """

    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(
                f"sliding_window is {self.sliding_window}, it must be at least 1; "
                "None attends to all tokens"
            )

    def num_dropped_blocks(self, position: int, block_size: int) -> int:
        """Leading blocks that neither `position` nor any later one can read."""
        if self.sliding_window is None:
            return 0
        return max(0, position + 1 - self.sliding_window) // block_size

    def next_drop(self, position: int, block_size: int) -> int:
        """The first position behind this one at which one more block is dropped. Of a window."""
        assert self.sliding_window is not None
        num_dropped = self.num_dropped_blocks(position, block_size)
        return (num_dropped + 1) * block_size + self.sliding_window - 1

    def num_prefix_blocks(self, block_size: int) -> int | None:
        """Blocks before a block boundary that must be there to go on from it; None for all."""
        if self.sliding_window is None:
            return None
        return -(-(self.sliding_window - 1) // block_size)

    def num_peak_blocks(self, num_tokens: int, max_chunk: int, block_size: int) -> int:
        """Most blocks held at once while `num_tokens` are computed, `max_chunk` a step.

        A chunk reads the window before it: window - 1 + chunk tokens in a row, which touch at
        most one block more than they fill."""
        num_all = -(-num_tokens // block_size)
        if self.sliding_window is None:
            return num_all
        num_span = self.sliding_window - 1 + max_chunk
        return min(num_all, -(-(num_span - 1) // block_size) + 1)
