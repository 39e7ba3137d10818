"""The KV cache as numbers: which physical block holds which tokens of which request.

Owns block ids, reference counts, the prefix index and eviction. Must not know tensors, sockets,
clocks, or the scheduler that asks.
"""

from engine_core.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.held_blocks import BlockIds, CachedRequest
from engine_core.kv_cache.manager import AllocStatus, KVCacheManager
from engine_core.kv_cache.prefix import CacheHit

__all__ = [
    "NULL_BLOCK_ID",
    "AllocStatus",
    "BlockIds",
    "BlockPool",
    "CacheHit",
    "CachedRequest",
    "KVCacheGroupSpec",
    "KVCacheManager",
]
