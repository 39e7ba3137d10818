"""The prefix cache: hashes of full blocks, their registration, look-up and deduplication."""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from engine_core.kv_cache.block_hashes import extend_block_hashes
from engine_core.kv_cache.groups import Checkpoints, KVCacheGroupSpec
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.sequence_blocks import (
    NULL_BLOCK_ID,
    BlockIds,
    CachedSequence,
    SequenceBlocks,
)
from protocol.block_hashes import root_hash
from protocol.explanations import LookupEnd

_FIRST_BLOCKS_A_BLOCK = 4


@dataclasses.dataclass(frozen=True, slots=True)
class CacheHit:
    """`num_tokens` need not be computed again."""

    num_tokens: int
    block_ids: BlockIds
    """Device blocks, a list a group; null where no block is needed or where it is on the host."""
    num_host_tokens: int = 0
    """Of `num_tokens`, those of blocks that must come from the host, in any group."""
    host_blocks: tuple[tuple[int, int, int], ...] = ()
    """(group, place in its table, host block)."""
    num_disk_tokens: int = 0
    """Of `num_tokens`, those of blocks that must come from disk, in any group."""
    disk_blocks: tuple[tuple[int, HashKey], ...] = ()
    """(place in the group's table, what it is found by on disk)."""
    num_key_tokens: int = 0
    """Tokens that all groups but sparse ones have; more than `num_tokens` where states lack."""


class FirstBlocks:
    """Under which salts and adapters the tokens of a first block are known.

    Only requests with a salt or an adapter are kept: those without are in the prefix index."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._roots: OrderedDict[bytes, bytes | None] = OrderedDict()

    def add(self, plain_hash: bytes, root: bytes) -> None:
        """
        Args:
            plain_hash: of the block's tokens without salt and adapter.
            root: of the salt and adapter that it has.
        """
        roots = self._roots
        known = roots.setdefault(plain_hash, root)
        if known != root:
            roots[plain_hash] = None
        if len(roots) > self._capacity:
            roots.popitem(last=False)

    def is_known_elsewhere(self, plain_hash: bytes, root: bytes) -> bool:
        """Whether these tokens were seen under another root than this one."""
        return plain_hash in self._roots and self._roots[plain_hash] != root


class PrefixCache:
    """`is_enabled`: else no block is hashed or found."""

    def __init__(
        self,
        offload: OffloadManager,
        *,
        checkpoints: Checkpoints,
        groups: Sequence[KVCacheGroupSpec],
        block_size: int,
        is_enabled: bool,
    ) -> None:
        self.is_enabled = is_enabled
        self.weights = ""
        """A name of the weights that compute the blocks; part of every hash."""
        self.num_deduplicated = 0
        """Blocks freed because an equal one was cached."""
        self._offload = offload
        self._pool = offload.device
        self._checkpoints = checkpoints
        self._groups = tuple(groups)
        self._block_size = block_size
        has_more = offload.host.num_blocks or offload.disk is not None
        self.has_one_tier = self._groups == (KVCacheGroupSpec(),) and not has_more
        """Blocks are on the device only, one table a sequence."""
        self._has_states = any(spec.is_sparse for spec in groups)
        self._has_keys = not all(spec.is_sparse for spec in groups)
        self._first_blocks = FirstBlocks(_FIRST_BLOCKS_A_BLOCK * self._pool.num_blocks)

    # ------------------------------------------------------------------ hashes

    def extend_hashes(self, seq: CachedSequence, num_full_blocks: int) -> None:
        """Hash what of the first `num_full_blocks` blocks was not hashed before."""
        hashes = seq.block_hashes
        start, size = len(hashes), self._block_size
        if start < num_full_blocks:
            parent = hashes[-1] if hashes else self._root_of(seq)
            token_bytes = seq.token_bytes(start * size, num_full_blocks * size)
            extend_block_hashes(hashes, parent, token_bytes, size, seq.content_spans)

    # ------------------------------------------------------------------ finding

    def find(self, seq: CachedSequence) -> CacheHit:
        """See KVCacheManager.find_cached_prefix."""
        num_reusable = (seq.num_tokens - 1) // self._block_size
        if not self.is_enabled or num_reusable <= 0:
            return CacheHit(0, tuple([[] for _ in self._groups]))
        self.extend_hashes(seq, num_reusable)
        hashes = seq.block_hashes[:num_reusable]
        return self._find_on_device(hashes) if self.has_one_tier else self._find_anywhere(hashes)

    def _find_on_device(self, block_hashes: Sequence[bytes]) -> CacheHit:
        """Find the leading blocks, where there is one group that keeps all and no host."""
        find = self._pool.finder(0)
        table: list[int] = []
        for block_hash in block_hashes:
            block_id = find(block_hash)
            if block_id is None:
                break
            table.append(block_id)
        return CacheHit(len(table) * self._block_size, (table,))

    def _find_anywhere(self, block_hashes: Sequence[bytes]) -> CacheHit:
        """Of each group the blocks that a token at the boundary reads; those before are the null
        block."""
        locate = self._offload.locate
        num_keys = num_blocks = self._num_found(self._within_reach(block_hashes), sparse=False)
        if self._has_states:
            num_blocks = self._num_found(block_hashes[:num_keys], sparse=True)
        tables, size = list[list[int]](), self._block_size
        host_blocks, host_places = list[tuple[int, int, int]](), set[int]()
        disk_blocks, disk_places = list[tuple[int, HashKey]](), set[int]()
        for group, spec in enumerate(self._groups):
            first = spec.num_dropped_blocks(num_blocks * size, size)
            table = [NULL_BLOCK_ID] * first
            for index in range(first, num_blocks):
                block_id = locate(group, block_hashes[index])
                if block_id is None:
                    disk_blocks.append((index, (group, block_hashes[index])))
                    disk_places.add(index)
                    block_id = NULL_BLOCK_ID
                elif block_id > self._pool.num_blocks:
                    host_blocks.append((group, index, block_id))
                    host_places.add(index)
                    block_id = NULL_BLOCK_ID
                table.append(block_id)
            tables.append(table)
        return CacheHit(
            num_blocks * size,
            tuple(tables),
            len(host_places) * size,
            tuple(host_blocks),
            len(disk_places) * size,
            tuple(disk_blocks),
            num_keys * size if self._has_keys else 0,
        )

    def _within_reach(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Of these blocks the first, with at most as many from disk as may be read at once."""
        disk = self._offload.disk
        if disk is None:
            return block_hashes
        num_left = disk.max_staged_blocks
        for index, block_hash in enumerate(block_hashes):
            for group in range(len(self._groups)):
                num_left -= (group, block_hash) in disk
            if num_left < 0:
                return block_hashes[:index]
        return block_hashes

    def _num_found(self, block_hashes: Sequence[bytes], *, sparse: bool) -> int:
        """The largest boundary, in blocks, before which every group has what it needs; with sparse
        groups or without."""
        is_found, size = self._offload.is_found, self._block_size
        num_blocks = len(block_hashes)
        for group, spec in enumerate(self._groups):
            if spec.keeps_all and not sparse:  # else they are found
                for index in range(num_blocks):
                    if not is_found(group, block_hashes[index]):
                        num_blocks = index
                        break
        settled = False
        while not settled:
            settled = True
            for group, spec in enumerate(self._groups):
                if spec.keeps_all or (spec.is_sparse and not sparse):
                    continue
                first = spec.num_dropped_blocks(num_blocks * size, size)
                for index in range(num_blocks - 1, first - 1, -1):
                    if not is_found(group, block_hashes[index]):
                        # every boundary behind this block, up to here, would need it too
                        num_blocks = index
                        settled = False
                        break
        return num_blocks

    def missing(self, seq: CachedSequence, num_tokens: int) -> list[HashKey]:
        """What a hit on the full blocks of the first `num_tokens` tokens lacks, by rising logical
        block."""
        num_blocks = min(num_tokens, seq.num_tokens - 1) // self._block_size
        if not self.is_enabled or num_blocks <= 0:
            return []
        self.extend_hashes(seq, num_blocks)
        keys: list[tuple[int, HashKey]] = []
        for group, spec in enumerate(self._groups):
            first = spec.num_dropped_blocks(num_blocks * self._block_size, self._block_size)
            keys += [(i, (group, seq.block_hashes[i])) for i in range(first, num_blocks)]
        return [key for _, key in sorted(keys) if not self._offload.is_found(*key)]

    # ------------------------------------------------------------------ registration

    def register_computed(self, seq: CachedSequence, seq_blocks: SequenceBlocks) -> None:
        """Register the computed full blocks. Tables stay as they are."""
        num_full = min(seq.num_computed_tokens, seq.num_tokens) // self._block_size
        if not self.is_enabled or num_full <= seq_blocks.num_registered:
            return
        self._register(seq, seq_blocks, num_full)

    def deduplicate(
        self, seq: CachedSequence, seq_blocks: SequenceBlocks, num_computed: int
    ) -> int | None:
        """Register the computed full blocks; where an equal block is cached, use that one instead.
        `num_computed`: the sequence's computed tokens. Returns the first logical block that is
        another one now, if any."""
        if (
            num_computed // self._block_size <= seq_blocks.num_registered
            and not seq_blocks.duplicates
        ):
            return None
        num_full = min(num_computed, seq.num_tokens) // self._block_size
        if num_full > seq_blocks.num_registered:
            self._register(seq, seq_blocks, num_full)
        if not seq_blocks.duplicates:  # the common case
            return None
        computed = sorted(index for index in seq_blocks.duplicates if index < num_full)
        seq_blocks.duplicates.difference_update(computed)
        replaced = [index for index in computed if self._replace(seq, seq_blocks, index)]
        return replaced[0] if replaced else None

    def register_last(
        self,
        seqs: Sequence[CachedSequence],
        holders: Sequence[SequenceBlocks],
        indexes: Sequence[int],
        contents: bytes,
        size: int,
    ) -> list[int]:
        """Register the last block of each sequence, `index` - 1, which is full: of one group, where
        all blocks before it are registered and no equal one is known. `contents`: of these blocks,
        `size` bytes each. Returns the places of those whose last block is registered now."""
        places, block_ids, names, stop = [], [], [], 0
        for place, (seq, own, index) in enumerate(zip(seqs, holders, indexes, strict=True)):
            start, stop = stop, stop + size
            hashes = seq.block_hashes
            if (
                own.num_blocks != index
                or own.num_registered < index - 1
                or own.duplicates
                or not 1 < index <= len(hashes) + 1
                or seq.content_spans
            ):
                continue
            if len(hashes) < index:
                hashes.append(blake2b(hashes[-1] + contents[start:stop]).digest())
            places.append(place)
            block_ids.append(own.tables[0][-1])
            names.append(hashes[index - 1])
        others = self._pool.register_run(block_ids, 0, names, 0, len(places))
        if others:
            kept = set(range(len(places))).difference(others)
            places = [places[number] for number in sorted(kept)]
        for place in places:
            holders[place].num_registered = indexes[place]
        return places

    def register_filling(
        self, seq: CachedSequence, seq_blocks: SequenceBlocks, num_full: int
    ) -> None:
        """Register blocks before this step fills them: a request that reuses one runs after this
        sequence within the step, or later."""
        if num_full > seq_blocks.num_registered:
            first = seq_blocks.num_registered
            others = self._register(seq, seq_blocks, num_full)
            for table, known_elsewhere in zip(seq_blocks.tables, others, strict=True):
                filling = table[first:num_full]
                for index in known_elsewhere:
                    filling[index - first] = NULL_BLOCK_ID
                self._offload.filling.update(filling)
            self._offload.filling.discard(NULL_BLOCK_ID)
            self.keep_on_disk(seq, seq_blocks, first)

    def keep_on_disk(self, seq: CachedSequence, seq_blocks: SequenceBlocks, first: int) -> None:
        """A prompt uses its full blocks from logical block `first` on, of states checkpoints."""
        disk = self._offload.disk
        if disk is None or seq.num_tokens < disk.min_tokens:
            return
        hashes = seq.block_hashes
        for group, table in enumerate(seq_blocks.tables):
            full = range(first, min(len(table), len(hashes)))
            places: Iterable[int] = full
            if group in self._checkpoints.groups:
                places = self._checkpoints.among(seq, seq_blocks, full)
            disk.use(
                ((group, hashes[index]), index) for index in places if table[index] != NULL_BLOCK_ID
            )

    def _register(
        self, seq: CachedSequence, seq_blocks: SequenceBlocks, num_full: int
    ) -> list[list[int]]:
        """Blocks num_registered .. num_full; where an equal one is known, a duplicate is noted.

        Returns:
            For each group, the places in its table of which an equal block is known.
        """
        first = seq_blocks.num_registered
        hashes = seq.block_hashes
        if len(hashes) < num_full:
            self.extend_hashes(seq, num_full)
        if not first and (seq.adapter is not None or seq.cache_salt is not None):
            self._first_blocks.add(self._plain_hash(seq), self._root_of(seq))
        others = []
        for group, table in enumerate(seq_blocks.tables):
            known = self._pool.register_run(table, group, hashes, first, num_full)
            seq_blocks.duplicates.update(known)
            others.append(known)
        seq_blocks.num_registered = num_full
        return others

    def _replace(self, seq: CachedSequence, seq_blocks: SequenceBlocks, index: int) -> bool:
        """Use the cached blocks instead of equal ones of a logical block. Returns whether any is
        another one now."""
        pool, is_changed = self._pool, False
        for group, table in enumerate(seq_blocks.tables):
            own = table[index]
            if own == NULL_BLOCK_ID:
                continue
            known = pool.register(own, group, seq.block_hashes[index])
            if known == own:
                continue
            is_computed = known not in self._offload.filling
            # a free block may be taken only if the own one becomes free for it
            if is_computed and (pool.ref_count(known) or pool.ref_count(own) == 1):
                pool.share([known])
                table[index] = known
                self._offload.release([own])
                self.num_deduplicated += 1
                if seq_blocks.sparse:  # maybe its own sequence's
                    seq_blocks.checkpoints |= {index}
                is_changed = True
            else:
                seq_blocks.duplicates.add(index)
        return is_changed

    # ------------------------------------------------------------------ explaining

    def explain(self, seq: CachedSequence, hit: CacheHit) -> LookupEnd:
        """Why `hit` is not longer."""
        num_reusable = (seq.num_tokens - 1) // self._block_size
        num_found = hit.num_tokens // self._block_size
        if not self.is_enabled:
            return LookupEnd.OFF
        if num_reusable <= 0:
            return LookupEnd.TOO_SHORT
        if num_found >= num_reusable:
            return LookupEnd.COMPLETE
        if hit.num_key_tokens > hit.num_tokens:
            return LookupEnd.NO_STATE
        self.extend_hashes(seq, num_reusable)
        missing = seq.block_hashes[num_found]
        # found, and yet no hit: what another group needs before it is gone
        if missing in self._pool.evicted or self._offload.is_anywhere(missing):
            return LookupEnd.EVICTED
        if num_found == 0 and self._is_known_elsewhere(seq):
            return LookupEnd.OTHER_SALT_OR_ADAPTER
        return LookupEnd.NEVER_SEEN

    def _is_known_elsewhere(self, seq: CachedSequence) -> bool:
        root = self._root_of(seq)
        has_no_root = seq.adapter is None and seq.cache_salt is None
        plain_hash = seq.block_hashes[0] if has_no_root else self._plain_hash(seq)
        if self._first_blocks.is_known_elsewhere(plain_hash, root):
            return True
        if plain_hash == seq.block_hashes[0]:
            return False
        return plain_hash in self._pool.evicted or self._offload.is_anywhere(plain_hash)

    def _plain_hash(self, seq: CachedSequence) -> bytes:
        """The hash of the first block, as if there were no salt and no adapter."""
        root = root_hash(adapter=None, cache_salt=None, weights=self.weights)
        size, hashes = self._block_size, list[bytes]()
        extend_block_hashes(hashes, root, seq.token_bytes(0, size), size, seq.content_spans)
        return hashes[0]

    def _root_of(self, seq: CachedSequence) -> bytes:
        return root_hash(adapter=seq.adapter, cache_salt=seq.cache_salt, weights=self.weights)
