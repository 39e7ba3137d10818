"""Slots for a sequence's next tokens: new blocks behind the last, and blocks of its own in place of
those that it shares."""

from collections.abc import Sequence

from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import PrefixCache
from engine_core.kv_cache.sequence_blocks import CachedSequence, SequenceBlocks, TableUpdate


class SlotAllocator:
    def __init__(
        self,
        offload: OffloadManager,
        prefix_cache: PrefixCache,
        groups: Sequence[KVCacheGroupSpec],
        block_size: int,
    ) -> None:
        self._offload = offload
        self._pool = offload.device
        self._prefix_cache = prefix_cache
        self._groups = groups
        self._block_size = block_size
        self.sliding = [
            group for group, spec in enumerate(groups) if spec.sliding_window is not None
        ]
        """Groups with a window."""

    def allocate(
        self,
        seq: CachedSequence,
        seq_blocks: SequenceBlocks,
        num_tokens: int,
        num_lookahead_slots: int,
    ) -> TableUpdate | None:
        """Room for tokens [num_computed, num_computed + num_tokens) of a sequence, and
        `num_lookahead_slots` behind them.

        The blocks that a chunk fills are registered now, before they are computed, so that requests
        of one step share them; a block that a single token fills only at a later call or when
        freed. Tokens beyond `seq.num_tokens` are drafts and never register a block. Returns what
        changed in the tables, or None if too few blocks are free: nothing changed then."""
        num_computed, num_old = seq.num_computed_tokens, seq_blocks.num_blocks
        # a step in flight may fail: then its last known token is computed again
        lowest = min(num_computed, seq.num_tokens - 1)
        stop = num_computed + num_tokens
        num_needed = -(-(stop + num_lookahead_slots) // self._block_size)
        num_new = num_needed - num_old if num_needed > num_old else 0
        first = num_computed // self._block_size
        shared = self.shared_blocks(seq_blocks, first, num_needed) if first < num_old else []
        num_wanted = num_new * len(self._groups) + len(shared)
        if num_wanted > self._pool.num_free:
            num_wanted -= self._num_droppable(lowest, seq_blocks)
            if num_wanted > self._pool.num_free:
                return None
        start = num_old
        if self._prefix_cache.is_enabled:
            replaced = self._prefix_cache.deduplicate(seq, seq_blocks, num_computed)
            start = num_old if replaced is None else replaced
        if self.sliding:
            self._drop_below(lowest, seq_blocks)
        if shared:
            start = min(start, shared[0][0])
            self._copy_on_write(num_computed, seq_blocks, shared)
        if first < num_old:
            for _, block_id in self._stale_blocks(seq_blocks, first, num_needed):
                self._pool.unindex([block_id])
        if num_new:
            for table in seq_blocks.tables:
                table += self._offload.allocate(num_new)
            seq_blocks.num_blocks += num_new
        if num_tokens > 1 and self._prefix_cache.is_enabled:
            num_full = min(stop, seq.num_tokens) // self._block_size
            self._prefix_cache.register_filling(seq, seq_blocks, num_full)
        return seq_blocks.update_from(start)

    def shared_blocks(
        self, seq_blocks: SequenceBlocks, first: int, stop: int
    ) -> list[tuple[int, int]]:
        """(logical block, group) from `first` to `stop` that other sequences hold too."""
        ref_count = self._pool.ref_count
        return [
            (index, group)
            for index in range(first, min(stop, seq_blocks.num_blocks))
            for group, table in enumerate(seq_blocks.tables)
            if ref_count(table[index]) > 1
        ]

    def _copy_on_write(
        self, num_computed: int, seq_blocks: SequenceBlocks, shared: list[tuple[int, int]]
    ) -> None:
        """Blocks of its own for those that others hold too; only the first has contents."""
        for index, group in shared:
            table = seq_blocks.tables[group]
            source, (block_id,) = table[index], self._offload.allocate(1)
            if index * self._block_size < num_computed:
                self._offload.pending.add_copy(source, block_id)
            self._offload.release([source])
            table[index] = block_id
        seq_blocks.unregister_from(shared[0][0])

    def _stale_blocks(
        self, seq_blocks: SequenceBlocks, first: int, stop: int
    ) -> list[tuple[int, int]]:
        """(logical block, block) from `first` to `stop` still indexed under another hash:
        to be unindexed before they are overwritten."""
        return [
            (index, table[index])
            for index in range(
                max(first, seq_blocks.num_registered), min(stop, seq_blocks.num_blocks)
            )
            for table in seq_blocks.tables
            if self._pool.hash_of(table[index]) is not None
        ]

    def _num_droppable(self, position: int, seq_blocks: SequenceBlocks) -> int:
        """Blocks that become free when what is out of the windows is dropped."""
        num_droppable = 0
        for group in self.sliding:
            stop = self._groups[group].num_dropped_blocks(position, self._block_size)
            droppable = seq_blocks.tables[group][seq_blocks.num_dropped[group] : stop]
            num_droppable += sum(self._pool.ref_count(block_id) == 1 for block_id in droppable)
        return num_droppable

    def _drop_below(self, position: int, seq_blocks: SequenceBlocks) -> None:
        for group in self.sliding:
            num_dropped = self._groups[group].num_dropped_blocks(position, self._block_size)
            self._offload.release(seq_blocks.drop(group, num_dropped))

    def drop_out_of_windows(self, seq: CachedSequence, seq_blocks: SequenceBlocks) -> int:
        """See `KVCacheManager.drop_out_of_windows`."""
        lowest = min(seq.num_computed_tokens, seq.num_tokens - 1)
        self._prefix_cache.register_computed(seq, seq_blocks)
        self._drop_below(lowest, seq_blocks)
        return min(self._groups[g].next_drop(lowest, self._block_size) for g in self.sliding)

    def num_allocated(self, seq: CachedSequence, seq_blocks: SequenceBlocks) -> int:
        """Positions below it may be written as they are."""
        first = seq.num_computed_tokens // self._block_size
        shared = self.shared_blocks(seq_blocks, first, seq_blocks.num_blocks)
        stale = self._stale_blocks(seq_blocks, first, seq_blocks.num_blocks)
        if not shared and not stale:
            return seq_blocks.num_blocks * self._block_size
        index = min(index for index, _ in (*shared, *stale))
        return max(seq.num_computed_tokens, index * self._block_size)
