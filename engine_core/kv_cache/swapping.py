"""Sequences that are swapped out to host memory as a whole, and back in."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from engine_core.kv_cache.block_counts import BlockCounts, exceeds
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.offload import OffloadManager
from engine_core.kv_cache.sequence_blocks import (
    NULL_BLOCK_ID,
    CachedSequence,
    SequenceBlocks,
    tail_first,
)


@dataclasses.dataclass(slots=True)
class _Moves:
    """The copies that a swap out would make; nothing is done yet."""

    key_of: dict[int, HashKey | None] = dataclasses.field(default_factory=dict)
    """Each device block to be kept, and what its contents are found by."""
    known: dict[int, int] = dataclasses.field(default_factory=dict)
    """Device block -> host block that has its contents already."""
    sources: dict[int, int] = dataclasses.field(default_factory=dict)
    """Device block -> device block whose contents are to be copied for it."""


class SwappedSequences:
    """Host tables and pins. Of a sequence only blocks that hold computed tokens are kept; slots
    behind them are freed and allocated anew."""

    def __init__(
        self, offload: OffloadManager, *, groups: Sequence[KVCacheGroupSpec], block_size: int
    ) -> None:
        self._offload = offload
        self._groups = groups
        self._block_size = block_size
        self._tables: dict[str, SequenceBlocks] = {}

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._tables

    # ------------------------------------------------------------------ out

    def swap_out(self, holders: Sequence[tuple[CachedSequence, SequenceBlocks]]) -> int | None:
        """Keep the computed blocks of these sequences on the host, each once. The device blocks
        stay theirs until the caller gives them back.
        Returns blocks to be copied, or None if the host has no room: nothing has changed then."""
        moves = self._plan(holders)
        host = self._offload.host
        if moves is None:
            return None
        new = {moves.key_of[block_id] or block_id: block_id for block_id in moves.sources}
        num_new = self._offload.device.ids.count(new.values())
        if exceeds(num_new, host.available - host.available_of(set(moves.known.values()))):
            return None
        copied = self._copy_out(moves)
        for seq, seq_blocks in holders:
            kept = seq_blocks.leading(self._num_kept(seq, seq_blocks))
            self._tables[seq.sequence_id] = kept
            for table in kept.tables:
                table[:] = [copied[b] if b != NULL_BLOCK_ID else b for b in table]
            for host_block in kept.real_blocks():
                host.pin(host_block)
        for host_block in copied.values():
            host.unpin(host_block)
        return len(new)

    def _num_kept(self, seq: CachedSequence, seq_blocks: SequenceBlocks) -> int:
        return min(seq_blocks.num_blocks, -(-seq.num_computed_tokens // self._block_size))

    def _plan(self, holders: Sequence[tuple[CachedSequence, SequenceBlocks]]) -> _Moves | None:
        """None if the contents of a block are not known."""
        moves = _Moves()
        num_device_blocks = self._offload.device.num_blocks
        for seq, seq_blocks in holders:
            num_full = min(seq.num_computed_tokens, seq.num_tokens) // self._block_size
            num_hashed = min(num_full, len(seq.block_hashes))
            num_kept = self._num_kept(seq, seq_blocks)
            for group, table in enumerate(seq_blocks.tables):
                for index, block_id in enumerate(table[:num_kept]):
                    if block_id == NULL_BLOCK_ID or block_id in moves.key_of:
                        continue
                    key = (group, seq.block_hashes[index]) if index < num_hashed else None
                    moves.key_of[block_id] = key
                    host_block = None if key is None else self._offload.host.find(*key)
                    if host_block is None:
                        source = self._offload.pending.origin(block_id)
                        if source is None:
                            return None
                        if source <= num_device_blocks:
                            moves.sources[block_id] = source
                            continue
                        host_block = source
                    moves.known[block_id] = host_block
        return moves

    def _copy_out(self, moves: _Moves) -> dict[int, int]:
        """The host block of each device block, pinned once an entry."""
        host, pending = self._offload.host, self._offload.pending
        pool_of = self._offload.device.ids.pool_of
        copied: dict[int, int] = {}
        for block_id, host_block in moves.known.items():
            host.pin(host_block)
            pending.require_swap_out(host_block)
            copied[block_id] = host_block
        for block_id, source in moves.sources.items():
            key = moves.key_of[block_id]
            known = None if key is None else host.find(*key)
            if known is not None:  # an equal block came before it in this loop
                host.pin(known)
                copied[block_id] = known
                continue
            host_block = self._offload.take_host_block(pool_of[block_id])
            host.pin(host_block)
            if key is not None:
                host.register(host_block, *key)
            pending.add_swap_out(source, host_block, is_optional=False)
            copied[block_id] = host_block
        return copied

    # ------------------------------------------------------------------ in

    def is_ready(self, seqs: Sequence[CachedSequence]) -> bool:
        """Whether all that the device lacks is on the host: not in the step that swaps it out. Nor
        may the device compute it in this step, if the groups' layers keep states."""
        filling = self._offload.filling if any(spec.is_sparse for spec in self._groups) else ()
        return not any(
            self._offload.pending.is_filled_now(host_block)
            if (known := self._on_device(host_block)) is None
            else known in filling
            for host_block in self._host_blocks(seqs)
        )

    def num_blocks_needed(
        self, seqs: Sequence[CachedSequence], num_lookahead_slots: int
    ) -> tuple[BlockCounts, BlockCounts]:
        """
        Returns:
            Device blocks for all tokens known now of these sequences; and those of them that
            others use there already, so that none is taken for them.
        """
        holders = Counter(self._host_blocks(seqs))
        tails: Counter[int] = Counter()
        for seq in seqs:
            seq_blocks = self._tables[seq.sequence_id]
            first = seq.num_computed_tokens // self._block_size
            for table in seq_blocks.tables:
                tails.update(filter(None, table[first:]))
        # the last of a tail's holders writes into the block itself, if it is one that writes
        copied = [
            block
            for block, num_writers in tails.items()
            for _ in range(num_writers - (num_writers == holders[block]))
        ]
        device = self._offload.device
        on_device = {block: self._on_device(block) for block in holders}
        in_use = {block for block, known in on_device.items() if known and device.ref_count(known)}
        shared = in_use | {block for block, num_holders in holders.items() if num_holders > 1}
        num_growth = sum(self._num_growth(seq, num_lookahead_slots, shared) for seq in seqs)
        # a tail that others use is taken for nothing, and then copied to be written
        count = self._offload.host.ids.count
        return count([*holders, *copied]) + num_growth, count(in_use - tails.keys())

    def _num_growth(
        self, seq: CachedSequence, num_lookahead_slots: int, shared: set[int]
    ) -> BlockCounts:
        """Blocks that a sequence takes on top of those it comes back with; `shared` are the host
        blocks that it will not hold alone."""
        seq_blocks = self._tables[seq.sequence_id]
        chunk = max(1, seq.num_tokens - seq.num_computed_tokens)
        num_needed = -(-(seq.num_tokens + num_lookahead_slots) // self._block_size)
        num_growth = list[int]()
        for group, (spec, table) in enumerate(zip(self._groups, seq_blocks.tables, strict=True)):
            num_peak = spec.num_peak_blocks(
                seq.num_tokens, chunk, self._block_size, num_lookahead_slots
            )
            if shared.isdisjoint(table):
                num_growth.append(max(0, num_peak - seq_blocks.num_held(group)))
            else:  # what falls out of reach does not become free: others hold it
                num_growth.append(min(num_peak, max(0, num_needed - len(table))))
        pools = [spec.pool for spec in self._groups]
        return self._offload.device.ids.by_pool(pools, num_growth)

    def swap_in(self, seqs: Sequence[CachedSequence]) -> dict[str, SequenceBlocks]:
        """Device tables with the same contents. The caller has checked that there is room."""
        device = self._offload.device
        block_of: dict[int, int] = {}
        missing: list[int] = []
        for host_block in dict.fromkeys(self._host_blocks(seqs)):
            block_id = self._on_device(host_block)
            if block_id is None:
                missing.append(host_block)
            else:
                device.share([block_id])
                block_of[host_block] = block_id
        for host_block, block_id in zip(
            missing, self._offload.allocate_to_swap_in(missing), strict=True
        ):
            block_of[host_block] = block_id
            key = self._offload.host.key_of(host_block)
            if key is not None:
                device.register(block_id, *key)
        tables = {}
        for seq in seqs:
            seq_blocks = self._tables[seq.sequence_id]
            mine = seq_blocks.leading(seq_blocks.num_blocks)
            for table in mine.tables:
                table[:] = [block_of[b] if b != NULL_BLOCK_ID else b for b in table]
            device.share(mine.real_blocks())
            tables[seq.sequence_id] = mine
        device.release(block_of.values())  # each sequence has its own references now
        for seq in seqs:
            self.drop(seq)
        return tables

    def drop(self, seq: CachedSequence) -> None:
        """The sequence's host blocks are no longer needed by it, if it has any."""
        seq_blocks = self._tables.pop(seq.sequence_id, None)
        if seq_blocks is not None:
            # the tail first, so that it is evicted first
            for host_block in tail_first([seq_blocks]):
                self._offload.host.unpin(host_block)

    def invalidate(self, seq: CachedSequence, first_block: int) -> None:
        """Drop the sequence's blocks from `first_block` on from the prefix cache."""
        seq_blocks = self._tables.get(seq.sequence_id)
        if seq_blocks is None:
            return
        for table in seq_blocks.tables:
            for host_block in table[first_block:]:
                key = self._offload.host.key_of(host_block)
                if key is not None:
                    self._offload.unindex(*key)

    def _host_blocks(self, seqs: Sequence[CachedSequence]) -> Iterator[int]:
        for seq in seqs:
            yield from self._tables[seq.sequence_id].real_blocks()

    def _on_device(self, host_block: int) -> int | None:
        key = self._offload.host.key_of(host_block)
        return None if key is None else self._offload.device.find(*key)

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that pins are exactly those of the tables."""
        pins: Counter[int] = Counter()
        for seq_blocks in self._tables.values():
            pins.update(seq_blocks.real_blocks())
        self._offload.host.check_pins(pins)
