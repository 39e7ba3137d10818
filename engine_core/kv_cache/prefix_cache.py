"""Makes sequences' full blocks findable, and gives up those that equal a known one.

Owns when a block may be found. Must not know queues, admission or swapping.
"""

from collections.abc import Sequence

from engine_core.kv_cache.block_hashes import BYTES_A_TOKEN, extend_block_hashes, root_hash
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.known_hashes import FirstBlocks
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.prefix_lookup import CacheHit, find_cached_prefix, find_on_device
from engine_core.kv_cache.sequence_blocks import NULL_BLOCK_ID, CachedSequence, SequenceBlocks
from protocol.explanations import LookupEnd

_FIRST_BLOCKS_A_BLOCK = 4


class PrefixCache:
    """
    Args:
        is_enabled: without it nothing is ever hashed or found.
    """

    def __init__(
        self,
        tiers: OffloadManager,
        *,
        groups: Sequence[KVCacheGroupSpec],
        block_size: int,
        is_enabled: bool,
    ) -> None:
        self.is_enabled = is_enabled
        self.num_deduplicated = 0
        """Blocks that were given up for an equal one."""
        self._tiers = tiers
        self._pool = tiers.device
        self._groups = tuple(groups)
        self._block_size = block_size
        self._is_plain = self._groups == (KVCacheGroupSpec(),) and not tiers.host.num_blocks
        self._first_blocks = FirstBlocks(_FIRST_BLOCKS_A_BLOCK * self._pool.num_blocks)

    # ------------------------------------------------------------------ hashes

    def extend_hashes(self, seq: CachedSequence, num_full_blocks: int) -> None:
        """Hash what of the first `num_full_blocks` blocks was not hashed before."""
        hashes = seq.block_hashes
        start, size = len(hashes), self._block_size
        if start < num_full_blocks:
            parent = hashes[-1] if hashes else _root_of(seq)
            token_bytes = seq.token_bytes(start * size, num_full_blocks * size)
            extend_block_hashes(hashes, parent, token_bytes, size)

    # ------------------------------------------------------------------ finding

    def find(self, seq: CachedSequence) -> CacheHit:
        """See KVCacheManager."""
        num_reusable = (seq.num_tokens - 1) // self._block_size
        if not self.is_enabled or num_reusable <= 0:
            return CacheHit(0, tuple([] for _ in self._groups))
        self.extend_hashes(seq, num_reusable)
        hashes = seq.block_hashes[:num_reusable]
        if self._is_plain:
            return find_on_device(self._pool.finder(0), hashes, self._block_size)
        return find_cached_prefix(
            self._tiers.locate, self._pool.num_blocks, self._groups, hashes, self._block_size
        )

    # ------------------------------------------------------------------ making findable

    def register_computed(self, seq: CachedSequence, held: SequenceBlocks) -> None:
        """The full blocks that are computed can be found now. Tables stay as they are."""
        num_full = min(seq.num_computed_tokens, seq.num_tokens) // self._block_size
        if not self.is_enabled or num_full <= held.num_findable:
            return
        self._register(seq, held, num_full)

    def adopt_known(
        self, seq: CachedSequence, held: SequenceBlocks, num_computed: int
    ) -> int | None:
        """The same, and where an equal block is known, the sequence holds that one from now on.

        Args:
            num_computed: the sequence's computed tokens.

        Returns:
            The first logical block that is another one now, if any.
        """
        if num_computed // self._block_size <= held.num_findable and not held.duplicates:
            return None
        num_full = min(num_computed, seq.num_tokens) // self._block_size
        if num_full > held.num_findable:
            self._register(seq, held, num_full)
        if not held.duplicates:  # nearly always
            return None
        computed = sorted(index for index in held.duplicates if index < num_full)
        held.duplicates.difference_update(computed)
        replaced = [index for index in computed if self._replace(seq, held, index)]
        return min(replaced, default=None)

    def register_filling(self, seq: CachedSequence, held: SequenceBlocks, num_full: int) -> None:
        """Blocks that this step fills can be found before they are: whoever finds one runs behind
        this sequence."""
        if num_full > held.num_findable:
            first = held.num_findable
            others = self._register(seq, held, num_full)
            for table, known_elsewhere in zip(held.tables, others, strict=True):
                filling = table[first:num_full]
                for index in known_elsewhere:
                    filling[index - first] = NULL_BLOCK_ID
                self._tiers.being_filled.update(filling)
            self._tiers.being_filled.discard(NULL_BLOCK_ID)

    def _register(
        self, seq: CachedSequence, held: SequenceBlocks, num_full: int
    ) -> list[list[int]]:
        """Blocks num_findable .. num_full; where an equal one is known, a duplicate is noted.

        Returns:
            For each group, the logical blocks of which an equal one is known.
        """
        first = held.num_findable
        hashes = seq.block_hashes
        if len(hashes) < num_full:
            self.extend_hashes(seq, num_full)
        if not first and (seq.adapter is not None or seq.cache_salt is not None):
            self._first_blocks.add(self._plain_hash(seq), _root_of(seq))
        others = [
            self._pool.register_run(table, group, hashes, first, num_full)
            for group, table in enumerate(held.tables)
        ]
        for known_elsewhere in others:
            held.duplicates.update(known_elsewhere)
        held.num_findable = num_full
        return others

    def _replace(self, seq: CachedSequence, held: SequenceBlocks, index: int) -> bool:
        """Hold the known block instead of an equal one. Whether any table changed."""
        pool, has_changed = self._pool, False
        for group, table in enumerate(held.tables):
            own = table[index]
            if own == NULL_BLOCK_ID:
                continue
            known = pool.register(own, group, seq.block_hashes[index])
            if known == own:
                continue
            is_computed = known not in self._tiers.being_filled
            # a free block may be taken only if the own one becomes free for it
            if is_computed and (pool.ref_count(known) or pool.ref_count(own) == 1):
                pool.share([known])
                table[index] = known
                self._tiers.release([own])
                self.num_deduplicated += 1
                has_changed = True
            else:
                held.duplicates.add(index)
        return has_changed

    # ------------------------------------------------------------------ explaining

    def explain(self, seq: CachedSequence, hit: CacheHit) -> LookupEnd:
        """Why `hit` is no longer."""
        num_reusable = (seq.num_tokens - 1) // self._block_size
        num_found = hit.num_tokens // self._block_size
        if not self.is_enabled:
            return LookupEnd.OFF
        if num_reusable <= 0:
            return LookupEnd.TOO_SHORT
        if num_found >= num_reusable:
            return LookupEnd.COMPLETE
        self.extend_hashes(seq, num_reusable)
        missing = seq.block_hashes[num_found]
        # found, and yet no hit: what a sliding window reads before it is gone
        if missing in self._pool.evicted or self._tiers.is_anywhere(missing):
            return LookupEnd.EVICTED
        if num_found == 0 and self._is_known_elsewhere(seq):
            return LookupEnd.OTHER_SALT_OR_ADAPTER
        return LookupEnd.NEVER_SEEN

    def _is_known_elsewhere(self, seq: CachedSequence) -> bool:
        root = _root_of(seq)
        is_plain = seq.adapter is None and seq.cache_salt is None
        plain_hash = seq.block_hashes[0] if is_plain else self._plain_hash(seq)
        if self._first_blocks.is_known_elsewhere(plain_hash, root):
            return True
        if plain_hash == seq.block_hashes[0]:
            return False
        return plain_hash in self._pool.evicted or self._tiers.is_anywhere(plain_hash)

    def _plain_hash(self, seq: CachedSequence) -> bytes:
        """Of the first block, as if there were no salt and no adapter."""
        hashes: list[bytes] = []
        data = seq.token_bytes(0, self._block_size)
        assert len(data) == self._block_size * BYTES_A_TOKEN
        extend_block_hashes(
            hashes, root_hash(adapter=None, cache_salt=None), data, self._block_size
        )
        return hashes[0]


def _root_of(seq: CachedSequence) -> bytes:
    return root_hash(adapter=seq.adapter, cache_salt=seq.cache_salt)
