"""Whether there is room for a sequence: counts blocks, changes nothing."""

import enum
from collections.abc import Sequence

from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import CacheHit
from engine_core.kv_cache.sequence_blocks import CachedSequence
from engine_core.kv_cache.swapping import SwappedSequences


class AllocStatus(enum.Enum):
    """May a request be admitted?"""

    OK = enum.auto()
    LATER = enum.auto()
    """Not enough free blocks now."""
    NEVER = enum.auto()
    """Does not fit in an empty cache."""


class Admission:
    """
    Args:
        watermark_blocks: kept free as head-room for the running requests.
    """

    def __init__(
        self,
        offload: OffloadManager,
        swapped: SwappedSequences,
        *,
        groups: Sequence[KVCacheGroupSpec],
        block_size: int,
        watermark_blocks: int,
    ) -> None:
        self._offload = offload
        self._swapped = swapped
        self._groups = tuple(groups)
        self._block_size = block_size
        self._watermark_blocks = watermark_blocks

    def of_new(
        self,
        num_total: int,
        hit: CacheHit,
        *,
        num_reserved_blocks: int,
        is_alone: bool,
        is_resumed: bool,
    ) -> AllocStatus:
        """Of a sequence that wants `num_total` blocks, those of `hit` among them."""
        device = self._offload.device
        num_shared = 0
        for spec, block_ids in zip(self._groups, hit.block_ids, strict=True):
            # a sliding group's found blocks leave it again, and new ones come in their place
            if spec.sliding_window is None:
                num_shared += len(block_ids) - device.num_free_of(block_ids)
        return self._decide(
            num_available=self._offload.num_copy_targets if hit.host_blocks else device.num_free,
            num_required=num_total - num_shared,
            num_total=num_total,
            num_reserved_blocks=num_reserved_blocks,
            is_alone=is_alone,
            is_resumed=is_resumed,
        )

    def of_swapped(
        self,
        seqs: Sequence[CachedSequence],
        *,
        num_reserved_blocks: int,
        is_alone: bool,
        num_lookahead_slots: int,
    ) -> AllocStatus:
        """Of sequences whose blocks are in host memory."""
        num_total, num_in_use, num_copied = self._swapped.num_blocks_wanted(seqs)
        num_total += num_copied
        shared = self._swapped.shared_blocks(seqs)
        for seq in seqs:
            num_total += self._num_growth(seq, num_lookahead_slots, shared)
        status = self._decide(
            num_available=self._offload.num_copy_targets,
            num_required=num_total - num_in_use,
            num_total=num_total,
            num_reserved_blocks=num_reserved_blocks,
            is_alone=is_alone,
            is_resumed=True,
        )
        if status is AllocStatus.OK and not self._swapped.is_ready(seqs):
            return AllocStatus.LATER
        return status

    def _decide(
        self,
        *,
        num_available: int,
        num_required: int,
        num_total: int,
        num_reserved_blocks: int,
        is_alone: bool,
        is_resumed: bool,
    ) -> AllocStatus:
        """
        Args:
            num_available: blocks that can be taken now.
            num_required: of those, how many all tokens known now take.
            num_total: the same if nothing were shared.
            num_reserved_blocks: blocks that running requests will still take.
            is_alone: nothing runs, so that no head-room is needed.
            is_resumed: was admitted before; the head-room cannot make it impossible now.
        """
        watermark = self._watermark_blocks
        if self._offload.device.num_blocks - num_total < (0 if is_resumed else watermark):
            return AllocStatus.NEVER
        head_room = num_reserved_blocks + (0 if is_alone else watermark)
        has_room = num_available - num_required >= head_room
        return AllocStatus.OK if has_room else AllocStatus.LATER

    def _num_growth(self, seq: CachedSequence, num_lookahead_slots: int, shared: set[int]) -> int:
        """Blocks that a swapped sequence takes on top of those it comes back with."""
        seq_blocks = self._swapped.table_of(seq)
        num_tokens = seq.num_tokens + num_lookahead_slots
        chunk = max(1, num_tokens - seq.num_computed_tokens)
        num_new = max(0, -(-num_tokens // self._block_size) - seq_blocks.num_blocks)
        num_growth = 0
        for spec, table, num_dropped in zip(
            self._groups, seq_blocks.tables, seq_blocks.num_dropped, strict=True
        ):
            num_peak = spec.num_peak_blocks(num_tokens, chunk, self._block_size)
            if shared.isdisjoint(table[num_dropped:]):
                num_growth += max(0, num_peak - (seq_blocks.num_blocks - num_dropped))
            else:  # what falls out of the window does not become free: others hold it
                num_growth += min(num_peak, num_new)
        return num_growth
