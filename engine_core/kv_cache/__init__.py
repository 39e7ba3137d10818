"""The KV cache as numbers: which physical block holds which tokens of which sequence.

Imports no tensors, sockets, clocks or scheduler."""

from engine_core.kv_cache.block_counts import (
    BlockCounts,
    PoolIds,
    PoolSizes,
    exceeds,
    pool_sizes,
    sizes_of,
)
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.copies import CacheCopies
from engine_core.kv_cache.disk import DiskMoves, DiskTier
from engine_core.kv_cache.groups import KVCacheGroupSpec
from engine_core.kv_cache.manager import AllocStatus, KVCacheManager
from engine_core.kv_cache.prefix_cache import CacheHit
from engine_core.kv_cache.sequence_blocks import (
    CONTENT_HASH_BYTES,
    NULL_BLOCK_ID,
    BlockIds,
    ContentSpan,
    TableUpdate,
)
from engine_core.kv_cache.transfers import Transfer, Transfers

__all__ = [
    "CONTENT_HASH_BYTES",
    "NULL_BLOCK_ID",
    "AllocStatus",
    "BlockCounts",
    "BlockIds",
    "BlockPool",
    "CacheCopies",
    "CacheHit",
    "ContentSpan",
    "DiskMoves",
    "DiskTier",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "PoolIds",
    "PoolSizes",
    "TableUpdate",
    "Transfer",
    "Transfers",
    "exceeds",
    "pool_sizes",
    "sizes_of",
]
