"""Which blocks each sequence holds, and all that the scheduler may ask of the cache."""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block_map import block_map
from engine_core.kv_cache.changes import CacheChanges
from engine_core.kv_cache.copies import CacheCopies
from engine_core.kv_cache.disk import DiskTier
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.next_blocks import NextBlocks
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import CacheHit, PrefixCache
from engine_core.kv_cache.refusal import Refusal
from engine_core.kv_cache.sequence_blocks import (
    NULL_BLOCK_ID,
    BlockIds,
    CachedSequence,
    SequenceBlocks,
    TableUpdate,
    tail_first,
)
from engine_core.kv_cache.slots import SlotAllocator
from engine_core.kv_cache.swapping import SwappedSequences
from protocol.explanations import LookupEnd
from protocol.snapshots import BlockMap


class AllocStatus(enum.Enum):
    """May a request be admitted?"""

    OK = enum.auto()
    LATER = enum.auto()
    """Not enough free blocks now."""
    NEVER = enum.auto()
    """Does not fit in an empty cache."""


class KVCacheManager:
    """Each entry of a sequence's table is one reference to a block. In tokens, a call of
    allocate_slots(seq, 5):

        [0 .. cached) reused  [cached .. computed) in the cache  [computed .. computed + 5) to run
        |------------------- full blocks: in the prefix cache --------------------|-- private --|

    `num_computed_tokens` counts what is computed or planned to be; a sequence whose planned tokens
    will not run has it set back before it is freed or swapped. A step's plan ends with
    `take_copies`. Raises ValueError: a number outside its limits.

    Args:
        num_blocks: usable blocks, ids 1..num_blocks. The tensors have one more, for id 0.
        block_size: tokens a block.
        groups: layers that attend alike. All groups take from the same pool.
        enable_prefix_caching: whether requests may reuse each other's full blocks.
        watermark: share of the blocks kept free when a request is admitted beside others.
        num_host_blocks: blocks in host memory, ids from num_blocks + 1 on; 0 for none.
        disk: blocks that outlive the process; None for none. One step runs at a time then.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVCacheGroupSpec] = (KVCacheGroupSpec(),),
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        disk: DiskTier | None = None,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        if not groups:
            raise ValueError("groups is empty; a model without a KV cache has a placeholder cache")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is {watermark}, it must be from 0 to below 1")
        self.block_size = block_size
        self.groups = tuple(groups)
        self.watermark_blocks = int(watermark * num_blocks)
        self._offload = OffloadManager(
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            num_groups=len(self.groups),
            disk=disk,
        )
        self._pool = self._offload.device
        self.host = self._offload.host
        self._prefix_cache = PrefixCache(
            self._offload,
            groups=self.groups,
            block_size=block_size,
            is_enabled=enable_prefix_caching,
        )
        whole = [spec.sliding_window is None for spec in self.groups]
        group = whole.index(True) if any(whole) else 0
        self.changes = CacheChanges(self._pool, self.host, group)
        self._swapped = SwappedSequences(self._offload, groups=self.groups, block_size=block_size)
        self._blocks_of: dict[str, SequenceBlocks] = {}
        """By sequence_id; only sequences that hold blocks on the device."""
        self._refusal: Refusal | None = None
        self.next_blocks: NextBlocks | None = None
        """Where every sequence has one table, without a window."""
        if self.groups == (KVCacheGroupSpec(),):
            self.next_blocks = NextBlocks(self._offload, self._prefix_cache, self._blocks_of)
        self._slots = SlotAllocator(self._offload, self._prefix_cache, self.groups, block_size)

    # ------------------------------------------------------------------ numbers

    @property
    def num_blocks(self) -> int:
        """In use + cached + empty."""
        return self._pool.num_blocks

    @property
    def num_blocks_in_use(self) -> int:
        return self._pool.num_in_use

    @property
    def num_blocks_cached(self) -> int:
        """Not in use, in the prefix cache."""
        return self._pool.num_cached

    @property
    def num_blocks_free(self) -> int:
        """Not in use, cached or not."""
        return self._pool.num_free

    @property
    def weights(self) -> str:
        """A name of the weights that compute the blocks; part of every hash."""
        return self._prefix_cache.weights

    @property
    def num_disk_blocks(self) -> int:
        return 0 if self._offload.disk is None else self._offload.disk.num_blocks

    @property
    def num_deduplicated_blocks(self) -> int:
        """Blocks freed because an equal one was cached; since the start."""
        return self._prefix_cache.num_deduplicated

    @property
    def num_shared_references(self) -> int:
        """References less the blocks in use: blocks saved by sharing."""
        return self._pool.num_references - self._pool.num_in_use

    def num_encoder_blocks(self, num_encoder_tokens: int) -> int:
        """Blocks for what an encoder made of a request's input; of an encoder-decoder model."""
        return 0

    def num_peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks of all groups that `num_tokens` need at once, `max_chunk` a step."""
        return sum(
            spec.num_peak_blocks(num_tokens, max_chunk, self.block_size) for spec in self.groups
        )

    def num_reserved_blocks(
        self, seq: CachedSequence, max_chunk: int, num_extra_tokens: int = 0
    ) -> int:
        """Blocks that a sequence will still take for its tokens known now and the extra ones."""
        num_tokens = seq.num_tokens + num_extra_tokens
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        if seq_blocks is None:
            return self.num_peak_blocks(num_tokens, max_chunk)
        num_missing = sum(
            max(
                0,
                spec.num_peak_blocks(num_tokens, max_chunk, self.block_size)
                - (seq_blocks.num_blocks - num_dropped),
            )
            for spec, num_dropped in zip(self.groups, seq_blocks.num_dropped, strict=True)
        )
        first = seq.num_computed_tokens // self.block_size
        shared = self._slots.shared_blocks(seq_blocks, first, seq_blocks.num_blocks)
        return num_missing + len(shared)

    def num_freed_blocks(self, seqs: Iterable[CachedSequence], hit: CacheHit) -> int:
        """Blocks that would be free if these sequences gave back theirs, less those of `hit`, which
        `can_admit` does not count as wanted now."""
        tables = [
            self._blocks_of[seq.sequence_id] for seq in seqs if seq.sequence_id in self._blocks_of
        ]
        references = Counter(block_id for table in tables for block_id in table.real_blocks())
        freed = {b for b, number in references.items() if number == self._pool.ref_count(b)}
        for spec, block_ids in zip(self.groups, hit.block_ids, strict=True):
            if spec.sliding_window is None:
                freed.difference_update(block_ids)
        return len(freed)

    def held_blocks(self, seq: CachedSequence) -> list[int]:
        """Ids of the device's blocks that a sequence holds, of all groups."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        return [] if seq_blocks is None else seq_blocks.real_blocks()

    def block_map(self, holders: Sequence[tuple[int, list[int]]]) -> BlockMap:
        """Who holds each block.

        Args:
            holders: all sequences that hold blocks: the owner's number in the map, and the blocks.
        """
        return block_map(self.num_blocks, self._pool.cached_blocks, holders)

    # ------------------------------------------------------------------ admission

    def find_cached_prefix(self, seq: CachedSequence) -> CacheHit:
        """What of the sequence's tokens is in memory or on disk, in whole blocks, and never
        all of them: the last token must be computed to choose the next one. Changes nothing but
        the hashes."""
        return self._prefix_cache.find(seq)

    def explain_lookup(self, seq: CachedSequence, hit: CacheHit) -> LookupEnd:
        """Why `hit`, just found, is not longer."""
        return self._prefix_cache.explain(seq, hit)

    def can_admit(
        self,
        seq: CachedSequence,
        hit: CacheHit,
        *,
        max_chunk: int,
        head_room: int,
        is_resumed: bool,
        num_lookahead_slots: int = 0,
        num_extra_blocks: int = 0,
    ) -> AllocStatus:
        """Whether all tokens known now have room, not only the first chunk's: otherwise a prompt
        would be admitted only to be preempted.

        Args:
            max_chunk: most tokens of a sequence in a step.
            head_room: blocks to be left free: what running sequences will still take, and the
                watermark unless nothing runs.
            is_resumed: was admitted before: refused only if it does not fit in an empty cache.
            num_extra_blocks: needed besides, for samples that will fork.
        """
        num_total = num_extra_blocks + self.num_peak_blocks(
            seq.num_tokens + num_lookahead_slots, max_chunk + num_lookahead_slots
        )
        num_shared = 0
        for spec, block_ids in zip(self.groups, hit.block_ids, strict=True):
            # a sliding group's found blocks leave it again, and new ones come in their place
            if spec.sliding_window is None:
                num_shared += len(block_ids) - self._pool.num_free_of(block_ids)
        if num_total > self._pool.num_blocks - (0 if is_resumed else self.watermark_blocks):
            return AllocStatus.NEVER
        has_copies = hit.host_blocks or hit.disk_blocks
        num_free = self._offload.num_copy_targets if has_copies else self._pool.num_free
        num_lacking = head_room - (num_free - (num_total - num_shared))
        if num_lacking <= 0:
            return AllocStatus.OK
        if self._prefix_cache.has_one_tier:
            num_found, num_hashed = len(hit.block_ids[0]), len(seq.block_hashes)
            is_whole = num_found >= min(num_hashed, (seq.num_tokens - 1) // self.block_size)
            missing = None if is_whole else seq.block_hashes[num_found]
            num_now = self._pool.num_free_or_reused
            self._refusal = Refusal(seq, seq.num_tokens, missing, num_lacking, head_room, num_now)
        return AllocStatus.LATER

    def still_lacks_blocks(self, seq: CachedSequence, head_room: int) -> bool:
        """Whether `can_admit` said LATER to this sequence last, and would again, whatever is cached
        of it now. Costs nothing a block."""
        refusal = self._refusal
        return refusal is not None and refusal.holds(self._pool, seq, head_room)

    def missing_blocks(self, seq: CachedSequence, num_tokens: int) -> list[HashKey]:
        """What is not in memory or on disk of the full blocks of the first `num_tokens` tokens, as
        far as a hit on all of them needs it."""
        return self._prefix_cache.missing(seq, num_tokens)

    @property
    def has_blocks_to_save(self) -> bool:
        """Whether the next plan will save some, if it computes anything or not."""
        return self._offload.disk is not None and self._offload.disk.may_save

    def stage(self, hit: CacheHit) -> int:
        """Have what `hit` found on disk read. Returns how many blocks are still to come; 0: it may
        be allocated."""
        disk = self._offload.disk
        return 0 if disk is None else disk.stage([key for _, key in hit.disk_blocks])

    # ------------------------------------------------------------------ a step

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
                self._pool.register(block_id, group, seq.block_hashes[index])
        if hit.disk_blocks:
            block_ids = self._offload.allocate_to_load([key for _, key in hit.disk_blocks])
            for (index, (group, block_hash)), block_id in zip(
                hit.disk_blocks, block_ids, strict=True
            ):
                tables[group][index] = block_id
                self._pool.register(block_id, group, block_hash)
        self._prefix_cache.keep_on_disk(seq, tables, 0)
        self._blocks_of[seq.sequence_id] = SequenceBlocks(
            tables,
            num_blocks=len(tables[0]),
            num_registered=len(tables[0]),
            num_dropped=[table.count(NULL_BLOCK_ID) for table in tables],
        )

    def allocate_slots(
        self, seq: CachedSequence, num_tokens: int, num_lookahead_slots: int = 0
    ) -> TableUpdate | None:
        """Room for the next `num_tokens` of a sequence: see `SlotAllocator.allocate`."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        if seq_blocks is not None:
            return self._slots.allocate(seq, seq_blocks, num_tokens, num_lookahead_slots)
        num_groups = len(self.groups)
        seq_blocks = SequenceBlocks(tuple([] for _ in self.groups), 0, 0, [0] * num_groups)
        update = self._slots.allocate(seq, seq_blocks, num_tokens, num_lookahead_slots)
        if update is not None:
            self._blocks_of[seq.sequence_id] = seq_blocks
        return update

    @property
    def has_windows(self) -> bool:
        """Whether any group has a sliding window."""
        return bool(self._slots.sliding)

    def drop_out_of_windows(self, seq: CachedSequence) -> int:
        """Free what no token still to be computed can read, of a sequence that holds blocks.
        Returns the position whose computation lets the next block go."""
        return self._slots.drop_out_of_windows(seq, self._blocks_of[seq.sequence_id])

    def num_allocated_slots(self, seq: CachedSequence) -> int:
        """Positions below it may be written without another allocate_slots; until a fork."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        return 0 if seq_blocks is None else self._slots.num_allocated(seq, seq_blocks)

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        """The child holds the parent's blocks of the first `num_tokens` tokens too. The first write
        into a shared block copies it."""
        assert child.sequence_id not in self._blocks_of, (
            f"{child.sequence_id!r} holds blocks already"
        )
        seq_blocks = self._blocks_of[parent.sequence_id].leading(-(-num_tokens // self.block_size))
        self._pool.share(seq_blocks.real_blocks())
        self._blocks_of[child.sequence_id] = seq_blocks
        num_full = min(parent.num_computed_tokens, num_tokens) // self.block_size
        child.block_hashes[:] = parent.block_hashes[:num_full]
        seq_blocks.unregister_from(num_full)

    def block_ids(self, seq: CachedSequence) -> BlockIds:
        """A copy of the sequence's whole tables."""
        return tuple([table.copy() for table in self._blocks_of[seq.sequence_id].tables])

    # ------------------------------------------------------------------ giving back

    def free(self, seq: CachedSequence) -> None:
        """Give back all that the sequence holds, on the device or on the host, if anything; the
        tail is evicted before the head."""
        seq_blocks = self._blocks_of.pop(seq.sequence_id, None)
        if seq_blocks is not None:
            self._prefix_cache.register_computed(seq, seq_blocks)
            self._offload.release(tail_first([seq_blocks]))
        self._swapped.drop(seq)

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

    def reset_prefix_cache(self) -> int:
        """Evict every cached block, of device and host, that is not in use, and all on disk.
        Returns how many."""
        num_on_disk = 0 if self._offload.disk is None else self._offload.disk.clear()
        return num_on_disk + self._offload.evict_cached()

    def evict_cached(self) -> int:
        """As `reset_prefix_cache`, but for the disk."""
        return self._offload.evict_cached()

    def use_weights(self, name: str, seqs: Iterable[CachedSequence]) -> None:
        """Blocks are computed by other weights from here on: what is cached is found again only
        when these weights come back. No sequence holds blocks.

        Args:
            name: of the weights; different ones have different names.
            seqs: all unfinished sequences.
        """
        assert not self._blocks_of, "sequences hold blocks of the old weights"
        self._prefix_cache.weights = name
        for seq in seqs:
            seq.block_hashes.clear()

    # ------------------------------------------------------------------ host memory

    def swap_out(self, seqs: Sequence[CachedSequence]) -> int | None:
        """Move these sequences to host memory: what they share stays shared.
        Returns blocks that are copied, or None if the host has no room: nothing changed then."""
        holders = [(seq, self._blocks_of[seq.sequence_id]) for seq in seqs]
        for seq, seq_blocks in holders:
            self._prefix_cache.register_computed(seq, seq_blocks)
        num_copied = self._swapped.swap_out(holders)
        if num_copied is not None:
            for seq in seqs:
                del self._blocks_of[seq.sequence_id]
            self._offload.release(tail_first([seq_blocks for _, seq_blocks in holders]))
        return num_copied

    def can_swap_in(
        self, seqs: Sequence[CachedSequence], *, head_room: int, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """`can_admit` for all these swapped sequences together. LATER also in the very step that
        swapped them out."""
        num_total, num_in_use = self._swapped.num_blocks_needed(seqs, num_lookahead_slots)
        if num_total > self._pool.num_blocks:
            return AllocStatus.NEVER
        has_room = self._offload.num_copy_targets - (num_total - num_in_use) >= head_room
        return AllocStatus.OK if has_room and self._swapped.is_ready(seqs) else AllocStatus.LATER

    def swap_in(self, seqs: Sequence[CachedSequence]) -> None:
        """Move them back, after `can_swap_in` said OK: their tables have the same contents."""
        self._blocks_of.update(self._swapped.swap_in(seqs))

    def take_copies(self) -> CacheCopies:
        """All copies that were caused since the last call: once a plan, at its end. The plan
        counts as executed from here on."""
        return self._offload.take_copies()

    # ------------------------------------------------------------------ state

    def num_wasted_slots(self, seqs: Iterable[CachedSequence]) -> int:
        """Slots of the blocks of `seqs` behind the last token of every sequence that has them."""
        num_filled: dict[int, int] = {}
        for seq in seqs:
            seq_blocks = self._blocks_of.get(seq.sequence_id)
            for table in () if seq_blocks is None else seq_blocks.tables:
                first = seq.num_tokens // self.block_size
                for index, block_id in enumerate(table[first:], start=first):
                    filled = max(0, seq.num_tokens - index * self.block_size)
                    num_filled[block_id] = max(filled, num_filled.get(block_id, 0))
        num_filled.pop(NULL_BLOCK_ID, None)
        return sum(self.block_size - filled for filled in num_filled.values())

    def check(self, seqs: Iterable[CachedSequence] = ()) -> None:
        """Assert that references and pins are exactly those of the tables, and that the tables of
        these sequences cover their computed tokens."""
        self._offload.check()
        self._swapped.check()
        references = self._references()
        for block_id in range(1, self._pool.num_blocks + 1):
            assert self._pool.ref_count(block_id) == references[block_id]
        for seq in seqs:
            seq_blocks = self._blocks_of[seq.sequence_id]
            assert seq_blocks.num_blocks * self.block_size >= seq.num_computed_tokens

    def _references(self) -> Counter[int]:
        """How often each block stands in a table."""
        references: Counter[int] = Counter()
        for seq_blocks in self._blocks_of.values():
            seq_blocks.check()
            references.update(seq_blocks.real_blocks())
        return references
