"""Which blocks each sequence holds: taken for its next tokens, shared, copied before a write, given
back."""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block_counts import BlockCounts, exceeds
from engine_core.kv_cache.disk import DiskTier
from engine_core.kv_cache.groups import Checkpoints, KVCacheGroupSpec
from engine_core.kv_cache.next_blocks import NextBlocks
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import CacheHit, PrefixCache
from engine_core.kv_cache.sequence_blocks import (
    NULL_BLOCK_ID,
    BlockIds,
    CachedSequence,
    SequenceBlocks,
    TableUpdate,
    tail_first,
)
from engine_core.kv_cache.swapping import SwappedSequences


class BlockTables:
    """The tables of all sequences that hold blocks on the device; see `KVCacheManager`, which adds
    who may take some."""

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int],
        block_size: int,
        groups: Sequence[KVCacheGroupSpec],
        enable_prefix_caching: bool,
        num_host_blocks: int | Sequence[int],
        disk: DiskTier | None,
        checkpoint_interval: int,
    ) -> None:
        self.block_size = block_size
        self.has_encoder = any(spec.is_encoders for spec in groups)
        """Whether the last table of a sequence is its request's encoder's."""
        self._encoder_pool = groups[-1].pool if self.has_encoder else 0
        self.groups = tuple(spec for spec in groups if not spec.is_encoders)
        """Those whose tables grow with the sequence."""
        self._has_pools = not isinstance(num_blocks, int) and len(num_blocks) > 1
        self._pool_of_group = [spec.pool for spec in self.groups]
        self._offload = OffloadManager(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_groups=len(self.groups),
            disk=disk,
        )
        self._pool = self._offload.device
        self.host = self._offload.host
        self._checkpoints = Checkpoints(
            self._pool.ids, groups=self.groups, block_size=block_size, interval=checkpoint_interval
        )
        self._prefix_cache = PrefixCache(
            self._offload,
            checkpoints=self._checkpoints,
            groups=self.groups,
            block_size=block_size,
            is_enabled=enable_prefix_caching and bool(self.groups),
        )
        self._sparse = self._checkpoints.groups
        self._dropping = [g for g, spec in enumerate(self.groups) if not spec.keeps_all]
        self._swapped = SwappedSequences(self._offload, groups=self.groups, block_size=block_size)
        self._blocks_of: dict[str, SequenceBlocks] = {}
        """By sequence_id; only sequences that hold blocks on the device."""
        self._encoder_blocks: dict[str, list[int]] = {}
        """Blocks of what an encoder made, by request_id, while any sequence of it holds blocks."""
        self.next_blocks: NextBlocks | None = None
        """The loop for many decodes; None unless every sequence has one table that keeps all."""
        if self.groups == (KVCacheGroupSpec(),):
            self.next_blocks = NextBlocks(self._offload, self._prefix_cache, self._blocks_of)

    @property
    def has_windows(self) -> bool:
        """Whether blocks of any group are dropped while a sequence runs."""
        return bool(self._dropping)

    def _by_group(self, counts: Sequence[int]) -> BlockCounts:
        """Sums of one number for each group of a sequence."""
        return self._pool.ids.by_pool(self._pool_of_group, counts)

    # ------------------------------------------------------------------ taking

    def allocate_cached(self, seq: CachedSequence, hit: CacheHit) -> None:
        """Start the sequence's tables with what was found; what is on the host is copied back, and
        what is on disk, which has been read (`stage`)."""
        assert seq.sequence_id not in self._blocks_of, f"{seq.sequence_id!r} holds blocks already"
        tables = tuple([table.copy() for table in hit.block_ids])
        for table in tables:
            # before others are taken, which evicts blocks
            self._pool.share([block_id for block_id in table if block_id != NULL_BLOCK_ID])
        if hit.host_blocks:
            block_ids = self._offload.allocate_to_swap_in(
                [block for _, _, block in hit.host_blocks]
            )
            for (group, index, _), block_id in zip(hit.host_blocks, block_ids, strict=True):
                tables[group][index] = block_id
                block_hash = seq.block_hashes[index]
                self._pool.register(block_id, group, block_hash)
        if hit.disk_blocks:
            keys = [key for _, key in hit.disk_blocks]
            pools = [self._pool_of_group[group] for group, _ in keys]
            block_ids = self._offload.allocate_to_load(keys, pools)
            for (index, (group, block_hash)), block_id in zip(
                hit.disk_blocks, block_ids, strict=True
            ):
                tables[group][index] = block_id
                self._pool.register(block_id, group, block_hash)
        num_blocks, wanted = hit.num_tokens // self.block_size, frozenset[int]()
        if self._sparse:
            num_keys = hit.num_key_tokens // self.block_size
            wanted = frozenset((num_blocks - 1, num_keys - 1))
        self._blocks_of[seq.sequence_id] = seq_blocks = SequenceBlocks(
            tables,
            num_blocks=num_blocks,
            num_registered=num_blocks,
            num_dropped=[table.count(NULL_BLOCK_ID) for table in tables],
            sparse=self._sparse,
            checkpoints=wanted,
            encoder=self._encoder_table(seq),
        )
        self._prefix_cache.keep_on_disk(seq, seq_blocks, 0)

    def _encoder_table(self, seq: CachedSequence) -> list[int]:
        """One reference more to each block of what the encoder made for the sequence's request, and
        the blocks themselves for the first that asks: filled anew, never cached."""
        if not self.has_encoder:
            return []
        known = self._encoder_blocks.get(seq.request_id)
        if known is None:
            num_blocks = -(-seq.num_encoder_tokens // self.block_size)
            known = self._offload.allocate(num_blocks, self._encoder_pool)
            self._encoder_blocks[seq.request_id] = known
        else:
            self._pool.share(known)
        return known

    def num_encoder_blocks(self, num_encoder_tokens: int) -> BlockCounts:
        """Blocks for what an encoder made of a request's input; of an encoder-decoder model."""
        if not self.has_encoder:
            return 0
        length = -(-num_encoder_tokens // self.block_size)
        return self._pool.ids.by_pool([self._encoder_pool], [length])

    def allocate_slots(
        self, seq: CachedSequence, num_tokens: int, num_lookahead_slots: int = 0
    ) -> TableUpdate | None:
        """Room for tokens [num_computed, num_computed + num_tokens) of a sequence, and
        `num_lookahead_slots` behind them: new blocks behind its last, and blocks of its own in
        place of those that it shares.

        The blocks that a chunk fills are registered now, before they are computed, so that requests
        of one step share them; a block that a single token fills only at a later call or when
        freed. Tokens beyond `seq.num_tokens` are drafts and never register a block. Returns what
        changed in the tables, or None if too few blocks are free: nothing changed then."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        if is_new := seq_blocks is None:
            tables: BlockIds = tuple([[] for _ in self.groups])
            seq_blocks = SequenceBlocks(tables, 0, 0, [0] * len(tables), sparse=self._sparse)
        num_computed, num_old = seq.num_computed_tokens, seq_blocks.num_blocks
        # a step in flight may fail: then its last known token is computed again
        lowest = min(num_computed, seq.num_tokens - 1)
        stop = num_computed + num_tokens
        num_needed = -(-(stop + num_lookahead_slots) // self.block_size)
        first = num_computed // self.block_size
        may_overwrite = first < num_old
        shared = self._shared_blocks(seq_blocks, first, num_needed) if may_overwrite else []
        num_new = num_needed - num_old if num_needed > num_old else 0
        wanted: BlockCounts = num_new * len(self.groups) + len(shared)
        needed = range(num_old, num_needed)
        if self._sparse:
            needed = self._checkpoints.needed(seq, stop, needed)
        if self._has_pools or self._sparse:
            wanted = self._num_wanted(seq_blocks, num_new, len(needed), shared)
        if exceeds(wanted, self._pool.free):
            wanted = wanted - self._num_droppable(lowest, seq_blocks)
            if exceeds(wanted, self._pool.free):
                return None
        start, places = num_old, list[int]()
        if self._prefix_cache.is_enabled:
            if self._sparse:
                places = self._checkpoints.before(seq, seq_blocks, needed, self._pool.free - wanted)
            replaced = self._prefix_cache.deduplicate(seq, seq_blocks, num_computed)
            start = num_old if replaced is None else replaced
        if self._dropping:
            self._drop_below(lowest, seq, seq_blocks)
        if shared:
            start = min(start, self._copy_on_write(num_computed, seq_blocks, shared))
        if may_overwrite:
            stale = self._stale_blocks(seq_blocks, first, num_needed)
            self._pool.unindex([seq_blocks.tables[group][index] for group, index in stale])
        if num_new:
            for group, table in enumerate(seq_blocks.tables):
                number = len(places) + len(needed) if group in self._sparse else num_new
                block_ids = self._pool.allocate(number, self._pool_of_group[group])
                self._offload.pending.on_reallocated(block_ids)
                if number < num_new:
                    ids = dict(zip([*places, *needed], block_ids, strict=True))
                    block_ids = [ids.get(i, NULL_BLOCK_ID) for i in range(num_old, num_needed)]
                table += block_ids
            seq_blocks.num_blocks += num_new
        if num_tokens > 1 and self._prefix_cache.is_enabled:
            num_full = min(stop, seq.num_tokens) // self.block_size
            self._prefix_cache.register_filling(seq, seq_blocks, num_full)
        if is_new:
            self._blocks_of[seq.sequence_id] = seq_blocks
        return seq_blocks.update_from(start)

    def _num_wanted(
        self, own: SequenceBlocks, num_new: int, num_sparse: int, shared: list[tuple[int, int]]
    ) -> BlockCounts:
        """Blocks to be taken for new logical blocks, in sparse groups and in all others, and in
        place of shared ones."""
        wanted = self._by_group([num_sparse if spec.is_sparse else num_new for spec in self.groups])
        return wanted + self._pool.ids.count([own.tables[g][i] for g, i in shared])

    def _shared_blocks(
        self, seq_blocks: SequenceBlocks, first: int, stop: int
    ) -> list[tuple[int, int]]:
        """(group, place in its table) of the logical blocks from `first` to `stop` that other
        sequences hold too."""
        ref_count = self._pool.ref_count
        return [
            (group, index)
            for group, table in enumerate(seq_blocks.tables)
            for index in range(first, min(stop, len(table)))
            if ref_count(table[index]) > 1
        ]

    def _copy_on_write(
        self, num_computed: int, seq_blocks: SequenceBlocks, shared: list[tuple[int, int]]
    ) -> int:
        """Blocks of its own for those that others hold too; only the first of a group has contents.
        Returns the first logical block that is another one now."""
        for group, index in shared:
            table, pool = seq_blocks.tables[group], self._pool_of_group[group]
            source, (block_id,) = table[index], self._offload.allocate(1, pool)
            if index * self.block_size < num_computed:
                self._offload.pending.add_copy(source, block_id)
            self._offload.release([source])
            table[index] = block_id
        changed = min(index for _, index in shared)
        seq_blocks.unregister_from(changed)
        return changed

    def _stale_blocks(
        self, seq_blocks: SequenceBlocks, first: int, stop: int
    ) -> list[tuple[int, int]]:
        """As `_shared_blocks`, those still indexed under another hash: to be unindexed before they
        are overwritten."""
        hash_of, first = self._pool.hash_of, max(first, seq_blocks.num_registered)
        return [
            (group, index)
            for group, table in enumerate(seq_blocks.tables)
            for index in range(first, min(stop, len(table)))
            if hash_of(table[index]) is not None
        ]

    def num_allocated_slots(self, seq: CachedSequence) -> int:
        """Positions below it may be written without another allocate_slots; until a fork."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        if seq_blocks is None:
            return 0
        first = seq.num_computed_tokens // self.block_size
        shared = self._shared_blocks(seq_blocks, first, seq_blocks.num_blocks)
        stale = self._stale_blocks(seq_blocks, first, seq_blocks.num_blocks)
        if not shared and not stale:
            return seq_blocks.num_blocks * self.block_size
        changed = min(index for _, index in (*shared, *stale))
        return max(seq.num_computed_tokens, changed * self.block_size)

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        """The child holds the parent's blocks of the first `num_tokens` tokens too. The first write
        into a shared block copies it."""
        assert child.sequence_id not in self._blocks_of, (
            f"{child.sequence_id!r} holds blocks already"
        )
        seq_blocks = self._blocks_of[parent.sequence_id].leading(-(-num_tokens // self.block_size))
        self._pool.share(seq_blocks.real_blocks())
        seq_blocks.encoder = self._encoder_table(child)
        self._blocks_of[child.sequence_id] = seq_blocks
        num_full = min(parent.num_computed_tokens, num_tokens) // self.block_size
        child.block_hashes[:] = parent.block_hashes[:num_full]
        seq_blocks.unregister_from(num_full)

    def block_ids(self, seq: CachedSequence) -> BlockIds:
        """A copy of the sequence's whole tables, its encoder's last."""
        seq_blocks = self._blocks_of[seq.sequence_id]
        tables = [table.copy() for table in seq_blocks.tables]
        if self.has_encoder:
            tables.append(seq_blocks.encoder.copy())
        return tuple(tables)

    # ------------------------------------------------------------------ giving back

    def _num_droppable(self, position: int, seq_blocks: SequenceBlocks) -> BlockCounts:
        """Blocks that become free when what is out of reach is dropped."""
        droppable = list[int]()
        for group in self._dropping:
            stop = self.groups[group].num_dropped_blocks(position, self.block_size)
            droppable += seq_blocks.tables[group][seq_blocks.num_dropped[group] : stop]
        return self._pool.ids.count([b for b in droppable if self._pool.ref_count(b) == 1])

    def _drop_below(self, position: int, seq: CachedSequence, seq_blocks: SequenceBlocks) -> None:
        """Give back what is out of reach. It can still be found, but for useless states."""
        for group in self._dropping:
            spec = self.groups[group]
            dropped = seq_blocks.drop(group, spec.num_dropped_blocks(position, self.block_size))
            if spec.is_sparse and dropped:
                useless = self._checkpoints.useless(seq, seq_blocks, dropped)
                useless = [each for each in useless if self._pool.ref_count(each) == 1]
                self._offload.filling.difference_update(useless)
                self._pool.unindex(useless)
            self._offload.release([block_id for _, block_id in dropped])

    def drop_out_of_windows(self, seq: CachedSequence) -> int:
        """Free what no token still to be computed can read, of a sequence that holds blocks.
        Returns the position whose computation lets the next block go."""
        seq_blocks = self._blocks_of[seq.sequence_id]
        lowest = min(seq.num_computed_tokens, seq.num_tokens - 1)
        self._prefix_cache.register_computed(seq, seq_blocks)
        self._drop_below(lowest, seq, seq_blocks)
        return min(self.groups[g].next_drop(lowest, self.block_size) for g in self._dropping)

    def free(self, seq: CachedSequence) -> None:
        """Give back all that the sequence holds, on the device or on the host, if anything; the
        tail is evicted before the head."""
        seq_blocks = self._blocks_of.pop(seq.sequence_id, None)
        if seq_blocks is not None:
            self._prefix_cache.register_computed(seq, seq_blocks)
            if self._sparse:
                self._drop_below(min(seq.num_computed_tokens, seq.num_tokens), seq, seq_blocks)
            self._release([(seq, seq_blocks)])
        self._swapped.drop(seq)

    def _release(self, holders: Sequence[tuple[CachedSequence, SequenceBlocks]]) -> None:
        self._offload.release(tail_first([seq_blocks for _, seq_blocks in holders]))
        for seq, seq_blocks in holders:
            if seq_blocks.encoder:
                self._offload.release(seq_blocks.encoder)
                if not self._pool.ref_count(seq_blocks.encoder[0]):
                    del self._encoder_blocks[seq.request_id]

    def invalidate(self, seq: CachedSequence, first_token: int = 0) -> None:
        """Drop what the sequence's blocks hold from `first_token` on from the prefix cache: it was
        not computed, or may be wrong."""
        first = first_token // self.block_size
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        if seq_blocks is not None:
            for group, table in enumerate(seq_blocks.tables):
                for block_id in table[first:]:
                    block_hash = self._pool.hash_of(block_id)
                    if block_hash is not None:
                        self._offload.unindex(group, block_hash)
            seq_blocks.unregister_from(first)
        self._swapped.invalidate(seq, first)

    # ------------------------------------------------------------------ host memory

    def swap_out(self, seqs: Sequence[CachedSequence]) -> int | None:
        """Move these sequences to host memory: what they share stays shared, and an encoder's
        blocks are given back. Returns blocks that are copied, or None if the host has no room:
        nothing changed then."""
        holders = [(seq, self._blocks_of[seq.sequence_id]) for seq in seqs]
        for seq, seq_blocks in holders:
            self._prefix_cache.register_computed(seq, seq_blocks)
        num_copied = self._swapped.swap_out(holders)
        if num_copied is not None:
            for seq in seqs:
                del self._blocks_of[seq.sequence_id]
            self._release(holders)
        return num_copied

    def swap_in(self, seqs: Sequence[CachedSequence]) -> None:
        """Move them back, after `can_swap_in` said OK: their tables have the same contents."""
        tables = self._swapped.swap_in(seqs)
        for seq in seqs:
            tables[seq.sequence_id].encoder = self._encoder_table(seq)
        self._blocks_of.update(tables)

    # ------------------------------------------------------------------ invariants

    def check(self, seqs: Iterable[CachedSequence] = ()) -> None:
        """Assert that references and pins are exactly those of the tables, and that the tables of
        these sequences cover their computed tokens."""
        self._offload.check()
        self._swapped.check()
        references: Counter[int] = Counter()
        for seq_blocks in self._blocks_of.values():
            seq_blocks.check()
            references.update([*seq_blocks.real_blocks(), *seq_blocks.encoder])
        for block_id in range(1, self._pool.num_blocks + 1):
            assert self._pool.ref_count(block_id) == references[block_id]
        for seq in seqs:
            seq_blocks = self._blocks_of[seq.sequence_id]
            assert seq_blocks.num_blocks * self.block_size >= seq.num_computed_tokens
