"""The cache as the scheduler sees it: admission, a step's blocks, sharing, host memory.

Owns no state: puts the parts together. Must not know queues, budgets or sampling.

A step's plan ends with `take_copies`. `num_computed_tokens` counts what is computed or planned to
be; a sequence whose planned tokens will not run has it set back before it is freed or swapped.
"""

from collections.abc import Iterable, Sequence

from engine_core.kv_cache.admission import Admission, AllocStatus
from engine_core.kv_cache.block_tables import BlockTables
from engine_core.kv_cache.copies import CacheCopies
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_cache import PrefixCache
from engine_core.kv_cache.prefix_lookup import CacheHit
from engine_core.kv_cache.sequence_blocks import (
    BlockIds,
    CachedSequence,
    CacheUsage,
    TableUpdate,
    tail_first,
)
from engine_core.kv_cache.swapping import SwappedSequences
from protocol.explanations import LookupEnd


class KVCacheManager:
    """
    Args:
        num_blocks: usable blocks, ids 1..num_blocks. The tensors have one more, for id 0.
        block_size: tokens a block.
        groups: layers that attend alike. All groups take from the same pool.
        enable_prefix_caching: whether requests may reuse each other's full blocks.
        watermark: share of the blocks kept free when a request is admitted beside others.
        num_host_blocks: blocks in host memory, ids from num_blocks + 1 on; 0 for none.

    Raises:
        ValueError: a number outside its limits.
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
        self._tiers = OffloadManager(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, num_groups=len(self.groups)
        )
        self._pool = self._tiers.device
        self._findable = PrefixCache(
            self._tiers,
            groups=self.groups,
            block_size=block_size,
            is_enabled=enable_prefix_caching,
        )
        self._swapped = SwappedSequences(self._tiers, block_size=block_size)
        self._tables = BlockTables(
            self._tiers, self._findable, groups=self.groups, block_size=block_size
        )
        self._held = self._tables.held
        self._admission = Admission(
            self._tiers,
            self._swapped,
            groups=self.groups,
            block_size=block_size,
            watermark_blocks=self.watermark_blocks,
        )

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
        """Held by nobody, and findable."""
        return self._pool.num_cached

    @property
    def num_blocks_free(self) -> int:
        """Held by nobody, findable or not."""
        return self._pool.num_free

    @property
    def num_host_blocks(self) -> int:
        return self._tiers.host.num_blocks

    @property
    def num_host_blocks_in_use(self) -> int:
        """Of swapped sequences."""
        return self._tiers.host.num_pinned

    @property
    def num_host_blocks_cached(self) -> int:
        """Findable, and of no swapped sequence."""
        return self._tiers.host.num_cached

    @property
    def num_deduplicated_blocks(self) -> int:
        """Blocks that filled, equalled a known one and were given back; since the start."""
        return self._findable.num_deduplicated

    @property
    def num_shared_references(self) -> int:
        """References less the blocks in use: blocks saved by sharing."""
        return self._pool.num_references - self._pool.num_in_use

    def num_peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks of all groups that so many tokens need at once, `max_chunk` a step."""
        return self._tables.num_peak_blocks(num_tokens, max_chunk)

    def num_reserved_blocks(
        self, seq: CachedSequence, max_chunk: int, num_extra_tokens: int = 0
    ) -> int:
        """Blocks that a sequence will still take for the tokens known now and so many more."""
        return self._tables.num_reserved_blocks(seq, max_chunk, num_extra_tokens)

    def num_common_prefix_blocks(self, seq: CachedSequence | None, num_holders: int) -> list[int]:
        """For each group, leading blocks of `seq` that all `num_holders` sequences that hold
        blocks share. 0 for fewer than two of them, and in sliding groups once blocks dropped."""
        return self._tables.num_common_prefix_blocks(seq, num_holders)

    # ------------------------------------------------------------------ admission

    def find_cached_prefix(self, seq: CachedSequence) -> CacheHit:
        """What of the sequence's tokens is in device or host memory, in whole blocks, and never
        all of them: the last token must be computed to choose the next one. Changes nothing but
        the hashes."""
        return self._findable.find(seq)

    def explain_lookup(self, seq: CachedSequence, hit: CacheHit) -> LookupEnd:
        """Why `hit`, just found and not yet adopted, is no longer."""
        return self._findable.explain(seq, hit)

    def can_admit(
        self,
        seq: CachedSequence,
        hit: CacheHit,
        *,
        max_chunk: int,
        num_reserved_blocks: int,
        is_alone: bool,
        is_resumed: bool,
        num_lookahead_slots: int = 0,
        num_extra_blocks: int = 0,
    ) -> AllocStatus:
        """Whether all tokens known now have room, not only the first chunk's: otherwise a prompt
        would be admitted only to be preempted.

        Args:
            max_chunk: most tokens of a sequence in a step.
            num_reserved_blocks: blocks that running sequences will still take.
            is_alone: nothing runs, so that no head-room is needed.
            is_resumed: was admitted before: refused only if it does not fit in an empty cache.
            num_extra_blocks: wanted besides, for samples that will branch off.
        """
        return self._admission.of_new(
            self.num_peak_blocks(
                seq.num_tokens + num_lookahead_slots, max_chunk + num_lookahead_slots
            )
            + num_extra_blocks,
            hit,
            num_reserved_blocks=num_reserved_blocks,
            is_alone=is_alone,
            is_resumed=is_resumed,
        )

    def adopt(self, seq: CachedSequence, hit: CacheHit) -> None:
        """Start the sequence's tables with what was found; what is on the host is copied back."""
        self._tables.adopt(seq, hit)

    # ------------------------------------------------------------------ a step

    def allocate_slots(
        self, seq: CachedSequence, num_tokens: int, num_lookahead_slots: int = 0
    ) -> TableUpdate | None:
        """Room for tokens [num_computed, num_computed + num_tokens) of a sequence, and so many
        slots behind them.

        The blocks that a chunk fills become findable now, before they are computed, so that
        requests of one step share them; a single token's only at a later call, or when given back.
        Tokens beyond `seq.num_tokens` are drafts and never make a block findable.

        Returns:
            What changed in the tables, or None if too few blocks are free: nothing changed then.
        """
        return self._tables.allocate_slots(seq, num_tokens, num_lookahead_slots)

    def writable_tokens(self, seq: CachedSequence) -> int:
        """Positions below it may be written without another allocate_slots; until a fork."""
        return self._tables.writable_tokens(seq)

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        """The child holds the parent's blocks of the first `num_tokens` tokens too. Whoever writes
        into a shared block first gets a copy of it."""
        self._tables.fork(parent, child, num_tokens)

    def block_ids(self, seq: CachedSequence) -> BlockIds:
        """A copy of the sequence's whole tables."""
        return self._tables.block_ids(seq)

    # ------------------------------------------------------------------ giving back

    def free(self, seq: CachedSequence) -> None:
        """Give back all that the sequence holds, on the device or on the host, if anything; the
        tail is evicted before the head."""
        self._tables.free(seq)
        self._swapped.drop(seq)

    def forget(self, seq: CachedSequence, first_token: int = 0) -> None:
        """Nobody may find what the sequence's blocks hold from `first_token` on: it was not
        computed, or is not to be trusted."""
        first = first_token // self.block_size
        self._tables.forget(seq, first)
        self._swapped.forget(seq, first)

    def reset_prefix_cache(self) -> int:
        """Forget every cached block, of device and host, that nobody holds. Returns how many."""
        return self._tiers.forget_cached()

    # ------------------------------------------------------------------ host memory

    def swap_out(self, seqs: Sequence[CachedSequence]) -> int | None:
        """Move these sequences to host memory: what they share stays shared.

        Returns:
            Blocks that are copied, or None if the host has no room: nothing changed then.
        """
        holders = [(seq, self._held[seq.sequence_id]) for seq in seqs]
        for seq, held in holders:
            self._findable.register_computed(seq, held)
        num_copied = self._swapped.swap_out(holders)
        if num_copied is not None:
            for seq in seqs:
                del self._held[seq.sequence_id]
            self._tiers.release(tail_first([held for _, held in holders]))
        return num_copied

    def can_swap_in(
        self,
        seqs: Sequence[CachedSequence],
        *,
        num_reserved_blocks: int,
        is_alone: bool,
        num_lookahead_slots: int = 0,
    ) -> AllocStatus:
        """Whether all tokens known now of all these swapped sequences have room. LATER also in the
        very step that swapped them out."""
        return self._admission.of_swapped(
            seqs,
            num_reserved_blocks=num_reserved_blocks,
            is_alone=is_alone,
            num_lookahead_slots=num_lookahead_slots,
        )

    def swap_in(self, seqs: Sequence[CachedSequence]) -> None:
        """Move them back, after `can_swap_in` said OK: their tables have the same contents."""
        self._held.update(self._swapped.swap_in(seqs))

    def take_copies(self) -> CacheCopies:
        """All copies that were caused since the last call: once a plan, at its end. From here on
        the plan is taken to run."""
        return self._tiers.take_copies()

    # ------------------------------------------------------------------ state

    def usage(self, seqs: Iterable[CachedSequence]) -> CacheUsage:
        """Where the blocks are, and the slots wasted in those of `seqs`; others are skipped that
        hold none."""
        return self._tables.usage(seqs)

    def check(self, seqs: Iterable[CachedSequence] = ()) -> None:
        """Assert that references and pins are exactly those of the tables, and that the tables of
        these sequences cover their computed tokens."""
        self._tiers.check()
        self._swapped.check()
        self._tables.check(seqs)
