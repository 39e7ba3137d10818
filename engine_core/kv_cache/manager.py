"""All that the scheduler may ask of the cache: what is found, who may start, what is held."""

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Sequence

from engine_core.kv_cache.block_counts import BlockCounts, exceeds
from engine_core.kv_cache.block_tables import BlockTables
from engine_core.kv_cache.changes import CacheChanges
from engine_core.kv_cache.copies import CacheCopies
from engine_core.kv_cache.disk import DiskTier
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.prefix_cache import CacheHit
from engine_core.kv_cache.sequence_blocks import NULL_BLOCK_ID, CachedSequence
from protocol.explanations import LookupEnd


class AllocStatus(enum.Enum):
    """May a request be admitted?"""

    OK = enum.auto()
    LATER = enum.auto()
    """There are not enough free blocks now."""
    NEVER = enum.auto()
    """Does not fit in an empty cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Refusal:
    """`num_lacking` blocks were missing, so the request is not looked up again before it may have
    room. That is N - |in use, and not of its hit|: it grows only by blocks that become free, by one
    more block of its prefix in the index, or where blocks of its hit left the index and others, in
    use, have their contents now. So the cost of a step does not grow with the prompt of a request
    that cannot start."""

    seq: CachedSequence
    num_tokens: int
    missing: bytes | None
    """The hash at which the hit ended; None if it was complete."""
    num_lacking: BlockCounts
    head_room: BlockCounts
    num_free_or_reused: int


class KVCacheManager(BlockTables):
    """Each entry of a sequence's table is one reference to a block. In tokens, a call of
    allocate_slots(seq, 5):

        [0 .. cached) reused  [cached .. computed) in the cache  [computed .. computed + 5) to run
        |------------------- full blocks: in the prefix cache --------------------|-- private --|

    `num_computed_tokens` counts what is computed or planned to be; a sequence whose planned tokens
    will not run has it set back before it is freed or swapped. A step's plan ends with
    `take_copies`. Raises ValueError: a number outside its limits.

    Args:
        num_blocks: usable blocks, ids 1..num_blocks; several numbers are of several pools, one for
            each page size, whose ids follow on each other (`PoolIds`). The tensors of a pool have
            one block more, for id 0.
        block_size: tokens a block.
        groups: layers that look back alike; none for a model that keeps nothing between steps.
            Each names its pool.
        enable_prefix_caching: whether requests may reuse each other's full blocks.
        watermark: share of the blocks kept free when a request is admitted beside others.
        num_host_blocks: blocks in host memory, as `num_blocks`, with the ids behind; 0 for none.
        disk: blocks that outlive the process; None for none. One step runs at a time then.
        checkpoint_interval: of so many tokens of a sequence sparse groups keep one state, for
            others to start from; 0 for none.
    """

    def __init__(
        self,
        *,
        num_blocks: int | Sequence[int],
        block_size: int,
        groups: Sequence[KVCacheGroupSpec] = (KVCacheGroupSpec(),),
        enable_prefix_caching: bool = True,
        watermark: float = 0.01,
        num_host_blocks: int | Sequence[int] = 0,
        disk: DiskTier | None = None,
        checkpoint_interval: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, it must be at least 1")
        if not 0.0 <= watermark < 1.0:
            raise ValueError(f"watermark is {watermark}, it must be from 0 to below 1")
        super().__init__(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=groups,
            enable_prefix_caching=enable_prefix_caching,
            num_host_blocks=num_host_blocks,
            disk=disk,
            checkpoint_interval=checkpoint_interval,
        )
        sizes = self._pool.ids.sizes
        self.watermark_blocks: BlockCounts = self._pool.ids.by_pool(
            range(len(sizes)), [int(watermark * size) for size in sizes]
        )
        keeping = [group for group, spec in enumerate(self.groups) if spec.keeps_all]
        self.changes = CacheChanges(self._pool, self.host, keeping[0] if keeping else 0)
        self._refusal: _Refusal | None = None

    # ------------------------------------------------------------------ numbers

    @property
    def num_blocks(self) -> int:
        """All blocks: in use, cached and empty."""
        return self._pool.num_blocks

    @property
    def num_blocks_in_use(self) -> int:
        return self._pool.num_in_use

    @property
    def num_blocks_cached(self) -> int:
        """Blocks in the prefix cache that are not in use."""
        return self._pool.num_cached

    def num_blocks_filled(self, pool: int) -> int:
        """Blocks of a pool that are in use or cached."""
        return self._pool.num_filled(pool)

    @property
    def cached_blocks(self) -> Sequence[int]:
        """The blocks that `num_blocks_cached` counts."""
        return self._pool.cached_blocks

    @property
    def num_blocks_free(self) -> int:
        """Blocks that are not in use, cached or not."""
        return self._pool.num_free

    @property
    def pool_sizes(self) -> BlockCounts:
        """`num_blocks`, of each pool."""
        return self._pool.sizes

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

    def num_peak_blocks(self, num_tokens: int, max_chunk: int, num_slots: int = 0) -> BlockCounts:
        """Most blocks of all groups that `num_tokens` need at once, `max_chunk` a step, and slots
        behind them."""
        return self._by_group(self._peaks(num_tokens, max_chunk, num_slots))

    def _peaks(self, num_tokens: int, max_chunk: int, num_slots: int) -> list[int]:
        """The same, of each group."""
        return [
            spec.num_peak_blocks(num_tokens, max_chunk, self.block_size, num_slots)
            for spec in self.groups
        ]

    def num_own_blocks(
        self, num_tokens: int, max_chunk: int, num_slots: int, num_shared: int, *, drops: bool
    ) -> BlockCounts:
        """As `num_peak_blocks`, less the full blocks of the first `num_shared` tokens, which are
        another sequence's too; at least one of each group. `drops`: that one gives back what is
        out of its own reach."""
        peaks = self._peaks(num_tokens, max_chunk, num_slots)
        full = num_shared // self.block_size
        pairs = zip(self.groups, peaks, strict=True)
        return self._by_group(
            [max(1, peak if drops and not spec.keeps_all else peak - full) for spec, peak in pairs]
        )

    def num_tails(self, num_sequences: int) -> BlockCounts:
        """One block of each group for each of so many sequences."""
        return self._by_group([num_sequences] * len(self.groups))

    def num_reserved_blocks(
        self, seq: CachedSequence, max_chunk: int, num_extra_tokens: int = 0
    ) -> BlockCounts:
        """Blocks that a sequence will still take for its tokens known now and the extra ones."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        peaks = self._peaks(seq.num_tokens, max_chunk, num_extra_tokens)
        if seq_blocks is None:
            return self._by_group(peaks)
        tables = seq_blocks.tables
        missing = [max(0, peak - seq_blocks.num_held(group)) for group, peak in enumerate(peaks)]
        first = seq.num_computed_tokens // self.block_size
        shared = self._shared_blocks(seq_blocks, first, seq_blocks.num_blocks)
        return self._by_group(missing) + self._pool.ids.count([tables[g][i] for g, i in shared])

    def num_freed_blocks(self, seqs: Iterable[CachedSequence], hit: CacheHit) -> BlockCounts:
        """Blocks that would be free if these sequences gave back theirs, less those of `hit`, which
        `can_admit` does not count as wanted now."""
        leaving = [
            self._blocks_of[seq.sequence_id] for seq in seqs if seq.sequence_id in self._blocks_of
        ]
        references = Counter(b for each in leaving for b in (*each.real_blocks(), *each.encoder))
        freed = {b for b, number in references.items() if number == self._pool.ref_count(b)}
        for spec, block_ids in zip(self.groups, hit.block_ids, strict=True):
            if spec.keeps_all:
                freed.difference_update(block_ids)
        return self._pool.ids.count(freed)

    def held_blocks(self, seq: CachedSequence) -> list[int]:
        """Ids of the device's blocks that a sequence holds, of all groups."""
        seq_blocks = self._blocks_of.get(seq.sequence_id)
        return [] if seq_blocks is None else [*seq_blocks.real_blocks(), *seq_blocks.encoder]

    def num_wasted_slots(self, seqs: Iterable[CachedSequence]) -> int:
        """Slots of the blocks of `seqs` behind the last token of every sequence that has them."""
        num_left: dict[int, int] = {}
        for seq in seqs:
            seq_blocks = self._blocks_of.get(seq.sequence_id)
            if seq_blocks is None:
                continue
            size = self.block_size
            first = seq.num_tokens // size
            for table in seq_blocks.tables:
                for index, block_id in enumerate(table[first:], start=first):
                    left = min(size, (index + 1) * size - seq.num_tokens)
                    num_left[block_id] = min(left, num_left.get(block_id, size))
        num_left.pop(NULL_BLOCK_ID, None)
        return sum(num_left.values())

    # ------------------------------------------------------------------ admission

    def find_cached_prefix(self, seq: CachedSequence) -> CacheHit:
        """What of the sequence's tokens is in memory or on disk, in whole blocks, and never
        all of them: the last token must be computed to choose the next one. Changes nothing but
        the hashes."""
        return self._prefix_cache.find(seq)

    @property
    def no_hit(self) -> CacheHit:
        """Nothing is found."""
        return CacheHit(0, tuple([[] for _ in self.groups]))

    def explain_lookup(self, seq: CachedSequence, hit: CacheHit) -> LookupEnd:
        """Why `hit`, just found, is not longer."""
        return self._prefix_cache.explain(seq, hit)

    @property
    def shares_states(self) -> bool:
        """Whether requests may start from states of recurrent layers that others computed."""
        return bool(self._sparse) and self._prefix_cache.is_enabled

    def hash_prompt(self, seq: CachedSequence) -> list[bytes]:
        """Names of the full blocks before the prompt's last token."""
        num_blocks = (seq.num_prompt_tokens - 1) // self.block_size
        self._prefix_cache.extend_hashes(seq, num_blocks)
        return seq.block_hashes[:num_blocks]

    def has_state(self, block_hash: bytes) -> bool:
        """Whether a sequence may start behind this block, if it has the keys and values."""
        return all(self._offload.is_found(group, block_hash) for group in self._sparse)

    def starts_in_this_step(self, hit: CacheHit) -> bool:
        """Whether a state that `hit` found is computed in the step at hand: by a request that must
        come before the one that starts there. A device has those with one token first, or none
        (`SchedulerConfig.computes_in_order`)."""
        filling, tables = self._offload.filling, hit.block_ids
        return any(not filling.isdisjoint(tables[group]) for group in self._sparse)

    def can_admit(
        self,
        seq: CachedSequence,
        hit: CacheHit,
        *,
        max_chunk: int,
        head_room: BlockCounts,
        is_resumed: bool,
        num_lookahead_slots: int = 0,
        num_extra_blocks: BlockCounts = 0,
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
        num_total = self.num_peak_blocks(seq.num_tokens, max_chunk, num_lookahead_slots)
        num_total = num_total + num_extra_blocks + self._num_missing_encoder_blocks(seq)
        pool, num_shared = self._pool, []
        for spec, block_ids in zip(self.groups, hit.block_ids, strict=True):
            # found blocks that leave the group again are counted as the new ones in their place
            if spec.keeps_all:
                num_shared.append(pool.in_use_of(block_ids))
        if exceeds(num_total, pool.sizes - (0 if is_resumed else self.watermark_blocks)):
            return AllocStatus.NEVER
        has_copies = hit.host_blocks or hit.disk_blocks
        num_free = self._offload.copy_targets if has_copies else pool.free
        num_lacking = head_room - (num_free - (num_total - sum(num_shared)))
        if not exceeds(num_lacking, 0):
            return AllocStatus.OK
        if self._prefix_cache.has_one_tier:
            num_found, num_hashed = len(hit.block_ids[0]), len(seq.block_hashes)
            is_whole = num_found >= min(num_hashed, (seq.num_tokens - 1) // self.block_size)
            missing = None if is_whole else seq.block_hashes[num_found]
            num_now = self._pool.num_free_or_reused
            self._refusal = _Refusal(seq, seq.num_tokens, missing, num_lacking, head_room, num_now)
        return AllocStatus.LATER

    def still_lacks_blocks(self, seq: CachedSequence, head_room: BlockCounts) -> bool:
        """Whether `can_admit` said LATER to this sequence last, and would again, whatever is cached
        of it now. Costs nothing a block."""
        was = self._refusal
        if was is None or seq is not was.seq or seq.num_tokens != was.num_tokens:
            return False
        if was.missing is not None and self._pool.find(0, was.missing) is not None:
            return False
        num_more = self._pool.num_free_or_reused - was.num_free_or_reused
        return exceeds(was.num_lacking + head_room - was.head_room, num_more)

    def _num_missing_encoder_blocks(self, seq: CachedSequence) -> BlockCounts:
        """0 where another sequence of its request has them."""
        if not self.has_encoder or seq.request_id in self._encoder_blocks:
            return 0
        return self.num_encoder_blocks(seq.num_encoder_tokens)

    def can_swap_in(
        self,
        seqs: Sequence[CachedSequence],
        *,
        head_room: BlockCounts,
        num_lookahead_slots: int = 0,
    ) -> AllocStatus:
        """`can_admit` for all these swapped sequences together. LATER also in the very step that
        swapped them out."""
        num_total, num_in_use = self._swapped.num_blocks_needed(seqs, num_lookahead_slots)
        if exceeds(num_total, self._pool.sizes):
            return AllocStatus.NEVER
        missing = {seq.request_id: self._num_missing_encoder_blocks(seq) for seq in seqs}
        num_wanted = sum(missing.values(), start=head_room) + num_total - num_in_use
        has_room = not exceeds(num_wanted, self._offload.copy_targets)
        return AllocStatus.OK if has_room and self._swapped.is_ready(seqs) else AllocStatus.LATER

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

    # ------------------------------------------------------------------ forgetting

    def reset_prefix_cache(self) -> int:
        """Evict every cached block, of device and host, that is not in use, and all on disk.
        Returns how many."""
        num_on_disk = 0 if self._offload.disk is None else self._offload.disk.clear()
        return num_on_disk + self._offload.evict_cached()

    def evict_cached(self) -> int:
        """Evict every cached block but those on disk. Returns how many."""
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

    def take_copies(self) -> CacheCopies:
        """All copies that were caused since the last call: once a plan, at its end. The plan
        counts as executed from here on."""
        return self._offload.take_copies()
