"""The cache of an encoder-decoder model: beside the tables of a sequence's own tokens one of the
encoder's, which is filled once and which all sequences of a request share."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from engine_core.kv_cache.manager import AllocStatus, KVCacheManager
from engine_core.kv_cache.prefix_cache import CacheHit
from engine_core.kv_cache.sequence_blocks import BlockIds, CachedSequence


class CrossAttentionKVCacheManager(KVCacheManager):
    """As its base, with one more table, the last of `block_ids`:

    tables of the groups     grow with the sequence, shared by prefix, copied on write
    the encoder's table      whole from the admission on; the request's, read by all its
                             sequences, never cached: it is filled anew after a preemption
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._encoder_blocks: dict[str, list[int]] = {}
        """By request id."""
        self._holders: Counter[str] = Counter()
        """Its sequences that hold blocks."""

    def num_encoder_blocks(self, num_encoder_tokens: int) -> int:
        return -(-num_encoder_tokens // self.block_size)

    def _num_missing(self, seq: CachedSequence) -> int:
        if seq.request_id in self._encoder_blocks:
            return 0
        return self.num_encoder_blocks(seq.num_encoder_tokens)

    # ------------------------------------------------------------------ taking

    def can_admit(
        self, seq: CachedSequence, hit: CacheHit, *, num_extra_blocks: int = 0, **options: Any
    ) -> AllocStatus:
        num_extra_blocks += self._num_missing(seq)
        return super().can_admit(seq, hit, num_extra_blocks=num_extra_blocks, **options)

    def allocate_cached(self, seq: CachedSequence, hit: CacheHit) -> None:
        super().allocate_cached(seq, hit)
        self._hold(seq)

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        super().fork(parent, child, num_tokens)
        self._hold(child)

    def can_swap_in(
        self, seqs: Sequence[CachedSequence], *, head_room: int, **options: Any
    ) -> AllocStatus:
        missing = {seq.request_id: self._num_missing(seq) for seq in seqs}
        return super().can_swap_in(seqs, head_room=head_room + sum(missing.values()), **options)

    def swap_in(self, seqs: Sequence[CachedSequence]) -> None:
        super().swap_in(seqs)
        for seq in seqs:
            self._hold(seq)

    def _hold(self, seq: CachedSequence) -> None:
        if seq.request_id not in self._encoder_blocks:
            num_blocks = self.num_encoder_blocks(seq.num_encoder_tokens)
            self._encoder_blocks[seq.request_id] = self._offload.allocate(num_blocks)
        self._holders[seq.request_id] += 1

    # ------------------------------------------------------------------ giving back

    def free(self, seq: CachedSequence) -> None:
        holds_blocks = seq.sequence_id in self._blocks_of
        super().free(seq)
        if holds_blocks:
            self._let_go(seq)

    def swap_out(self, seqs: Sequence[CachedSequence]) -> int | None:
        """The encoder's blocks are not copied."""
        num_copied = super().swap_out(seqs)
        if num_copied is not None:
            for seq in seqs:
                self._let_go(seq)
        return num_copied

    def _let_go(self, seq: CachedSequence) -> None:
        self._holders[seq.request_id] -= 1
        if not self._holders[seq.request_id]:
            del self._holders[seq.request_id]
            self._offload.release(self._encoder_blocks.pop(seq.request_id))

    # ------------------------------------------------------------------ what is held

    def block_ids(self, seq: CachedSequence) -> BlockIds:
        """The encoder's table is the last one."""
        return *super().block_ids(seq), self._encoder_blocks[seq.request_id].copy()

    def held_blocks(self, seq: CachedSequence) -> list[int]:
        return [*super().held_blocks(seq), *self._encoder_blocks.get(seq.request_id, ())]

    def num_freed_blocks(self, seqs: Iterable[CachedSequence], hit: CacheHit) -> int:
        gone = list(seqs)
        leaving = Counter(seq.request_id for seq in gone if seq.sequence_id in self._blocks_of)
        num_freed = sum(
            len(self._encoder_blocks[request_id])
            for request_id, number in leaving.items()
            if number == self._holders[request_id]
        )
        return super().num_freed_blocks(gone, hit) + num_freed

    def check(self, seqs: Iterable[CachedSequence] = ()) -> None:
        assert self._encoder_blocks.keys() == self._holders.keys()
        assert self._holders.total() == len(self._blocks_of)
        super().check(seqs)

    def _references(self) -> Counter[int]:
        references = super()._references()
        for block_ids in self._encoder_blocks.values():
            references.update(block_ids)
        return references
