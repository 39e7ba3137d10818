"""The cache of a model that keeps nothing between steps: admits everything, gives no blocks."""

from typing import Any

from engine_core.kv_cache.copies import CacheCopies
from engine_core.kv_cache.manager import AllocStatus, KVCacheManager
from engine_core.kv_cache.sequence_blocks import BlockIds, TableUpdate

_NO_LIMIT = 2**31 - 1


class PlaceholderKVCacheManager(KVCacheManager):
    def __init__(self) -> None:
        super().__init__(num_blocks=1, block_size=16, enable_prefix_caching=False, watermark=0.0)

    @property
    def num_blocks(self) -> int:
        return 0

    @property
    def num_blocks_free(self) -> int:
        return 0

    def num_peak_blocks(self, *_: Any, **__: Any) -> int:
        return 0

    def num_reserved_blocks(self, *_: Any, **__: Any) -> int:
        return 0

    def can_admit(self, *_: Any, **__: Any) -> AllocStatus:
        return AllocStatus.OK

    def allocate_cached(self, *_: Any) -> None:
        pass

    def allocate_slots(self, *_: Any, **__: Any) -> TableUpdate:
        return TableUpdate(0, self.block_ids(), _NO_LIMIT // self.block_size)

    def num_allocated_slots(self, *_: Any) -> int:
        """No position ever needs a block."""
        return _NO_LIMIT

    def fork(self, *_: Any) -> None:
        pass

    def block_ids(self, *_: Any) -> BlockIds:
        return ([],)

    def swap_out(self, *_: Any) -> int:
        return 0

    def can_swap_in(self, *_: Any, **__: Any) -> AllocStatus:
        return AllocStatus.OK

    def swap_in(self, *_: Any) -> None:
        pass

    def take_copies(self) -> CacheCopies:
        return CacheCopies(swap_in=[], swap_out=[], copy=[])

    def check(self, *_: Any) -> None:
        pass
