"""The cache of a model that keeps nothing between steps: admits everything, gives no blocks."""

from collections.abc import Iterable, Sequence

from engine_core.kv_cache.admission import AllocStatus
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.prefix_cache import CacheHit
from engine_core.kv_cache.sequence_blocks import BlockIds, CachedSequence, CacheUsage, TableUpdate

_NO_LIMIT = 2**31 - 1


class PlaceholderKVCacheManager(KVCacheManager):
    """
    Args:
        block_size: reported, without effect.
    """

    def __init__(self, *, block_size: int = 16) -> None:
        super().__init__(
            num_blocks=1, block_size=block_size, enable_prefix_caching=False, watermark=0.0
        )

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_blocks_free(self) -> int:
        return 0

    def num_peak_blocks(self, num_tokens: int, max_chunk: int) -> int:
        return 0

    def num_reserved_blocks(
        self, seq: CachedSequence, max_chunk: int, num_extra_tokens: int = 0
    ) -> int:
        return 0

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
        return AllocStatus.OK

    def allocate_cached(self, seq: CachedSequence, hit: CacheHit) -> None:
        pass

    def allocate_slots(
        self, seq: CachedSequence, num_tokens: int, num_lookahead_slots: int = 0
    ) -> TableUpdate | None:
        return TableUpdate(0, self.block_ids(seq), _NO_LIMIT // self.block_size)

    def num_allocated_slots(self, seq: CachedSequence) -> int:
        """No position ever needs a block."""
        return _NO_LIMIT

    def fork(self, parent: CachedSequence, child: CachedSequence, num_tokens: int) -> None:
        pass

    def block_ids(self, seq: CachedSequence) -> BlockIds:
        return ([],)

    def swap_out(self, seqs: Sequence[CachedSequence]) -> int | None:
        return 0

    def can_swap_in(
        self,
        seqs: Sequence[CachedSequence],
        *,
        num_reserved_blocks: int,
        is_alone: bool,
        num_lookahead_slots: int = 0,
    ) -> AllocStatus:
        return AllocStatus.OK

    def swap_in(self, seqs: Sequence[CachedSequence]) -> None:
        pass

    def usage(self, seqs: Iterable[CachedSequence]) -> CacheUsage:
        return CacheUsage(0, 0, 0, 0)

    def check(self, seqs: Iterable[CachedSequence] = ()) -> None:
        pass
