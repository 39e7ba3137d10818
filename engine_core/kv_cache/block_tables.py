"""Which blocks each sequence on the device holds, in order, and how its tables grow.

Owns references: each entry of a table is one. Must not know admission, queues or host memory. In
tokens, for allocate_slots(seq, 5):

    [0 .. cached) found  [cached .. computed) in the cache  [computed .. computed + 5) to run
    |-------------------- full blocks: findable ---------------------|--- private ---|
"""

from collections.abc import Iterable, Sequence

from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import PrefixCache
from engine_core.kv_cache.prefix_lookup import CacheHit
from engine_core.kv_cache.sequence_blocks import (
    NULL_BLOCK_ID,
    BlockIds,
    CachedSequence,
    CacheUsage,
    SequenceBlocks,
    TableUpdate,
    tail_first,
)
from engine_core.kv_cache.usage import check_tables, num_wasted_slots


class BlockTables:
    """
    Args:
        groups: one table each.
    """

    def __init__(
        self,
        tiers: OffloadManager,
        findable: PrefixCache,
        *,
        groups: Sequence[KVCacheGroupSpec],
        block_size: int,
    ) -> None:
        self.held: dict[str, SequenceBlocks] = {}
        """By sequence_id; only those that hold blocks on the device."""
        self._block_size = block_size
        self._groups = tuple(groups)
        self._tiers = tiers
        self._pool = tiers.device
        self._findable = findable
        self._sliding = [
            group for group, spec in enumerate(self._groups) if spec.sliding_window is not None
        ]

    # ------------------------------------------------------------------ a step

    def adopt(self, seq: CachedSequence, hit: CacheHit) -> None:
        """See KVCacheManager."""
        assert seq.sequence_id not in self.held, f"{seq.sequence_id!r} holds blocks already"
        tables = tuple([table.copy() for table in hit.block_ids])
        for table in tables:
            # before others are taken, which evicts blocks
            self._pool.share([block_id for block_id in table if block_id != NULL_BLOCK_ID])
        if hit.host_blocks:
            block_ids = self._tiers.allocate_to_swap_in([block for _, _, block in hit.host_blocks])
            for (group, index, _), block_id in zip(hit.host_blocks, block_ids, strict=True):
                tables[group][index] = block_id
                self._pool.register(block_id, group, seq.block_hashes[index])
        num_dropped = [table.count(NULL_BLOCK_ID) for table in tables]
        self.held[seq.sequence_id] = SequenceBlocks.starting_with(tables, num_dropped)

    def allocate_slots(
        self, seq: CachedSequence, num_tokens: int, num_lookahead_slots: int
    ) -> TableUpdate | None:
        """See KVCacheManager."""
        held = self.held.get(seq.sequence_id)
        if held is None:
            held = SequenceBlocks.starting_with(
                tuple([] for _ in self._groups), [0] * len(self._groups)
            )
        num_computed, num_old = seq.num_computed_tokens, held.num_blocks
        # a token that a step in flight samples may be lost: its last known one is computed again
        lowest = min(num_computed, seq.num_tokens - 1)
        stop = num_computed + num_tokens
        num_needed = -(-(stop + num_lookahead_slots) // self._block_size)
        num_new = num_needed - num_old if num_needed > num_old else 0
        first = num_computed // self._block_size
        shared = self._shared_blocks(held, first, num_needed) if first < num_old else []
        num_wanted = num_new * len(self._groups) + len(shared)
        if num_wanted > self._pool.num_free:
            num_wanted -= self._num_droppable(lowest, held) if num_new else 0
            if num_wanted > self._pool.num_free:
                return None
        start = num_old
        if self._findable.is_enabled:
            replaced = self._findable.adopt_known(seq, held, num_computed)
            start = num_old if replaced is None else replaced
        if num_new and self._sliding:
            self._drop_out_of_window(lowest, held)
        if shared:
            start = min(start, shared[0][0])
            self._copy_on_write(num_computed, held, shared)
        if first < num_old:
            for _, block_id in self._foreign_blocks(held, first, num_needed):
                self._pool.forget([block_id])
        if num_new:
            for table in held.tables:
                table += self._tiers.allocate(num_new)
            held.num_blocks += num_new
            self.held[seq.sequence_id] = held
        if num_tokens > 1 and self._findable.is_enabled:
            num_full = min(stop, seq.num_tokens) // self._block_size
            self._findable.register_filling(seq, held, num_full)
        return held.update_from(start)

    def _shared_blocks(self, held: SequenceBlocks, first: int, stop: int) -> list[tuple[int, int]]:
        """(logical block, group) of held blocks from `first` to `stop` that others hold too."""
        ref_count = self._pool.ref_count
        return [
            (index, group)
            for index in range(first, min(stop, held.num_blocks))
            for group, table in enumerate(held.tables)
            if ref_count(table[index]) > 1
        ]

    def _copy_on_write(
        self, num_computed: int, held: SequenceBlocks, shared: list[tuple[int, int]]
    ) -> None:
        """Blocks of its own for those that others hold too; only the first has contents."""
        for index, group in shared:
            table = held.tables[group]
            source, (block_id,) = table[index], self._tiers.allocate(1)
            if index * self._block_size < num_computed:
                self._tiers.pending.add_copy(source, block_id)
            self._tiers.release([source])
            table[index] = block_id
        held.forget_from(shared[0][0])

    def _foreign_blocks(self, held: SequenceBlocks, first: int, stop: int) -> list[tuple[int, int]]:
        """(logical block, block) of held blocks from `first` to `stop` that are found by another's
        tokens: whoever filled them has left. They are not to be found once they are written."""
        return [
            (index, table[index])
            for index in range(max(first, held.num_findable), min(stop, held.num_blocks))
            for table in held.tables
            if self._pool.hash_of(table[index]) is not None
        ]

    def _num_droppable(self, position: int, held: SequenceBlocks) -> int:
        """Blocks that become free when what is out of the windows is dropped."""
        num_droppable = 0
        for group in self._sliding:
            stop = self._groups[group].num_dropped_blocks(position, self._block_size)
            droppable = held.tables[group][held.num_dropped[group] : stop]
            num_droppable += sum(self._pool.ref_count(block_id) == 1 for block_id in droppable)
        return num_droppable

    def _drop_out_of_window(self, position: int, held: SequenceBlocks) -> None:
        for group in self._sliding:
            num_dropped = self._groups[group].num_dropped_blocks(position, self._block_size)
            self._tiers.release(held.drop(group, num_dropped))

    def writable_tokens(self, seq: CachedSequence) -> int:
        """Positions below it may be written without another allocate_slots; until a fork."""
        held = self.held.get(seq.sequence_id)
        if held is None:
            return 0
        first = seq.num_computed_tokens // self._block_size
        shared = self._shared_blocks(held, first, held.num_blocks)
        foreign = self._foreign_blocks(held, first, held.num_blocks)
        if not shared and not foreign:
            return held.num_blocks * self._block_size
        index = min(index for index, _ in (*shared, *foreign))
        return max(seq.num_computed_tokens, index * self._block_size)

    # ------------------------------------------------------------------ sharing and giving back

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        """The child holds the parent's blocks of the first `num_tokens` tokens too. Whoever of them
        writes into a block first gets a copy of it."""
        assert child.sequence_id not in self.held, f"{child.sequence_id!r} holds blocks already"
        held = self.held[parent.sequence_id].leading(-(-num_tokens // self._block_size))
        self._pool.share(held.real_blocks())
        self.held[child.sequence_id] = held
        num_full = min(parent.num_computed_tokens, num_tokens) // self._block_size
        child.block_hashes[:] = parent.block_hashes[:num_full]
        held.forget_from(num_full)

    def block_ids(self, seq: CachedSequence) -> BlockIds:
        """A copy of the whole tables."""
        return tuple([table.copy() for table in self.held[seq.sequence_id].tables])

    def free(self, seq: CachedSequence) -> None:
        """Give back what the sequence holds, if anything, as one moment for the order of
        eviction."""
        held = self.held.pop(seq.sequence_id, None)
        if held is not None:
            self._findable.register_computed(seq, held)
            self._tiers.release(tail_first([held]))

    def forget(self, seq: CachedSequence, first: int) -> None:
        """Nobody may find what the sequence holds from logical block `first` on."""
        held = self.held.get(seq.sequence_id)
        if held is None:
            return
        for group, table in enumerate(held.tables):
            for block_id in table[first:]:
                block_hash = self._pool.hash_of(block_id)
                if block_hash is not None:
                    self._tiers.forget(group, block_hash)
        held.forget_from(first)

    # ------------------------------------------------------------------ numbers

    def num_peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """See KVCacheManager."""
        return sum(
            spec.num_peak_blocks(num_tokens, max_chunk, self._block_size) for spec in self._groups
        )

    def num_reserved_blocks(
        self, seq: CachedSequence, max_chunk: int, num_extra_tokens: int
    ) -> int:
        """See KVCacheManager."""
        num_tokens = seq.num_tokens + num_extra_tokens
        held = self.held.get(seq.sequence_id)
        if held is None:
            return self.num_peak_blocks(num_tokens, max_chunk)
        num_missing = sum(
            max(
                0,
                spec.num_peak_blocks(num_tokens, max_chunk, self._block_size)
                - (held.num_blocks - num_dropped),
            )
            for spec, num_dropped in zip(self._groups, held.num_dropped, strict=True)
        )
        first = seq.num_computed_tokens // self._block_size
        return num_missing + len(self._shared_blocks(held, first, held.num_blocks))

    def num_common_prefix_blocks(self, seq: CachedSequence | None, num_holders: int) -> list[int]:
        """See KVCacheManager."""
        counts = [0] * len(self._groups)
        held = None if seq is None else self.held.get(seq.sequence_id)
        if held is None or num_holders < 2:
            return counts
        for group, table in enumerate(held.tables):
            for block_id in table:
                # the null block has no references, so a sliding group stops there
                if self._pool.ref_count(block_id) != num_holders:
                    break
                counts[group] += 1
        return counts

    def usage(self, seqs: Iterable[CachedSequence]) -> CacheUsage:
        """See KVCacheManager."""
        holders = [
            (seq, self.held[seq.sequence_id]) for seq in seqs if seq.sequence_id in self.held
        ]
        pool = self._pool
        return CacheUsage(
            num_used_blocks=pool.num_in_use,
            num_cached_blocks=pool.num_cached,
            num_empty_blocks=pool.num_free - pool.num_cached,
            num_wasted_slots=num_wasted_slots(holders, self._block_size),
        )

    def check(self, seqs: Iterable[CachedSequence]) -> None:
        """Assert that references are those of the tables, and that those of `seqs` are long
        enough."""
        references = check_tables(self.held)
        for block_id in range(1, self._pool.num_blocks + 1):
            assert self._pool.ref_count(block_id) == references[block_id]
        for seq in seqs:
            held = self.held[seq.sequence_id]
            assert held.num_blocks * self._block_size >= seq.num_computed_tokens
