"""What layers that look back alike need of the cache, in blocks, and which states are kept."""

import dataclasses
from collections.abc import Sequence

from engine_core.kv_cache.block_counts import BlockCounts, PoolIds, exceeds
from engine_core.kv_cache.sequence_blocks import CachedSequence, SequenceBlocks


@dataclasses.dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table. With a reach of 5 and 4 tokens a block, about to compute
    position 11, which reads 7 8 9 10 and itself:

        | 0 1 2 3 | 4 5 6 7 | 8 9 10 . |
          dropped    needed    needed

    A recurrent layer keeps a record a block: its state at the block's start, and rows of the tokens
    (`kernels/interface/recurrence.py`). A token reads its own block, or the one before it: a reach
    of 2. A full block says what the state at its end is, and is never written again. Records are
    large, so that such a group is sparse: of a chunk's blocks those have one that the next step
    starts from, and checkpoints, from which other sequences may start; tables have holes. The last
    full block stays until the next one is full, so that a sequence that ends leaves one behind:

        chunk of 9 blocks   | 0 | 0 | checkpoint | 0 | 0 | 0 | 0 | last full | last . |

    Args:
        reach: most tokens that a token looks back on, itself included; None for all.
        is_sparse: the layers are recurrent.
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
        """Leading blocks that neither `position` nor any later one can read; of a sparse group that
        are needed for nothing else, either."""
        if self.reach is None:
            return 0
        if self.is_sparse:
            return max(0, position // block_size - 1)
        return max(0, position + 1 - self.reach) // block_size

    def next_drop(self, position: int, block_size: int) -> int:
        """The first position behind this one at which one more block is dropped. Not of a group
        that keeps all."""
        assert self.reach is not None
        num_dropped = self.num_dropped_blocks(position, block_size)
        if self.is_sparse:
            return (num_dropped + 2) * block_size
        return (num_dropped + 1) * block_size + self.reach - 1

    def num_peak_blocks(
        self, num_tokens: int, max_chunk: int, block_size: int, num_slots: int = 0
    ) -> int:
        """Most blocks held at once while `num_tokens` are computed, `max_chunk` a step, with
        `num_slots` behind each chunk; without checkpoints, which are taken where there is room.

        A chunk reads what is within reach before it: reach - 1 + chunk tokens in a row, which touch
        at most one block more than they fill. In a sparse group two blocks are there before it, and
        two have the end of what it fills."""
        num_all = -(-(num_tokens + num_slots) // block_size)
        if self.reach is None:
            return num_all
        num_kept = block_size if self.is_sparse else self.reach - 1
        num_touched = -(-(num_kept + max_chunk + num_slots - 1) // block_size) + 1
        if self.is_sparse:
            num_touched = min(num_touched, 4 + -(-num_slots // block_size))
        return min(num_all, num_touched)


class Checkpoints:
    """Which blocks of sparse groups have a record: those that a sequence goes on from, and
    checkpoints, from which others may start.

    Args:
        interval: of so many tokens one block is a checkpoint; 0: none is for its place.
    """

    def __init__(
        self, ids: PoolIds, *, groups: Sequence[KVCacheGroupSpec], block_size: int, interval: int
    ) -> None:
        self.groups = [group for group, spec in enumerate(groups) if spec.is_sparse]
        """The sparse groups."""
        self._specs = groups
        self._block_size = block_size
        self._every = -(-interval // block_size)
        self._each = ids.by_pool([groups[group].pool for group in self.groups])
        """Blocks that a checkpoint takes."""

    def needed(self, seq: CachedSequence, stop: int, places: range) -> range:
        """Those of a table's new places that a sequence goes on from when it is computed up to
        `stop`."""
        spec = self._specs[self.groups[0]]
        first = spec.num_dropped_blocks(min(stop, seq.num_tokens - 1), self._block_size)
        return range(max(first, places.start), places.stop)

    def among(self, seq: CachedSequence, seq_blocks: SequenceBlocks, places: range) -> list[int]:
        """The checkpoints of these places: blocks that the sequence started from, or that are
        wanted; where its prompt would be found again; and one every so many tokens."""
        every, found = self._every, set(seq_blocks.checkpoints.intersection(places))
        found.update(place for place in seq.checkpoints if place in places)
        if every:
            found.update(range(places.start + (-places.start - 1) % every, places.stop, every))
        if (last := (seq.num_prompt_tokens - 1) // self._block_size - 1) in places:
            found.add(last)
        return sorted(found)

    def before(
        self,
        seq: CachedSequence,
        seq_blocks: SequenceBlocks,
        needed: range,
        num_free: BlockCounts,
    ) -> list[int]:
        """The checkpoints of new places before the `needed` ones, if so many free blocks have room
        for them."""
        places = range(seq_blocks.num_blocks, min(needed.start, needed.stop))
        checkpoints = self.among(seq, seq_blocks, places)
        for number in range(len(checkpoints)):
            num_free = num_free - self._each
            if exceeds(0, num_free):
                return checkpoints[:number]
        return checkpoints

    def useless(
        self, seq: CachedSequence, seq_blocks: SequenceBlocks, dropped: list[tuple[int, int]]
    ) -> list[int]:
        """Of blocks that leave a sparse group's table, by place and id, those that are no
        checkpoints: cached, they would only push others out of the pool."""
        kept = self.among(seq, seq_blocks, range(dropped[0][0], dropped[-1][0] + 1))
        return [block_id for place, block_id in dropped if place not in kept]
