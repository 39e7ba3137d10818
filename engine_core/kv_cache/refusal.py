"""A request that blocks were short for is not looked up again before it may have room."""

import dataclasses

from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.sequence_blocks import CachedSequence


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """`num_lacking` blocks were missing. Its room is N - |in use, and not of its hit|: that grows
    only by blocks that become free, by one more block of its prefix in the index, or where blocks
    of its hit left the index and others, in use, have their contents now. So the cost of a step
    does not grow with the prompt of a request that cannot start."""

    seq: CachedSequence
    num_tokens: int
    missing: bytes | None
    """The hash at which the hit ended; None if it was complete."""
    num_lacking: int
    head_room: int
    num_free_or_reused: int

    def holds(self, pool: BlockPool, seq: CachedSequence, head_room: int) -> bool:
        """Whether `seq` cannot have room yet, of one tier and table, with `head_room` left free."""
        if seq is not self.seq or seq.num_tokens != self.num_tokens:
            return False
        if self.missing is not None and pool.find(0, self.missing) is not None:
            return False
        num_more = pool.num_free_or_reused - self.num_free_or_reused
        return num_more < self.num_lacking + head_room - self.head_room
