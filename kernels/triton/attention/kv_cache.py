"""The KV cache of a layer on an NVIDIA GPU: of each block keys [K, S, D], then values."""

import torch

from kernels.interface.kv_cache import KVCache, KVShape


def view_kv_cache(blocks_BN: torch.Tensor, shape: KVShape) -> KVCache:
    """See `Operations.view_kv_cache`. Raises ValueError: a block size that is not a power of two,
    or keys and values of unlike sizes."""
    size = shape.block_size
    if size & (size - 1) or size < 1:
        raise ValueError(
            f"block size {size} is not a power of two; choose --block-size 16, 32, 64 or 128"
        )
    if shape.index_size:
        raise ValueError("keys of an indexer are for a CPU; run this model with --device cpu")
    if shape.values_in_keys:
        keys = shape.split(blocks_BN)[0].view(len(blocks_BN), 1, size, shape.key_size)
        return KVCache(keys, keys[..., -shape.value_size :], shape)
    if shape.key_size != shape.value_size:
        raise ValueError(f"keys of {shape.key_size} and values of {shape.value_size} elements")
    heads = len(blocks_BN), shape.num_kv_heads, size, shape.key_size
    keys, values = (part.view(heads) for part in shape.split(blocks_BN))
    return KVCache(keys, values, shape)


def read_kv_cache(kv_cache: KVCache, slots_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Operations.read_kv_cache`."""
    size = kv_cache.shape.block_size
    blocks_L, offsets_L = slots_L // size, slots_L % size
    return kv_cache.keys[blocks_L, :, offsets_L], kv_cache.values[blocks_L, :, offsets_L]
