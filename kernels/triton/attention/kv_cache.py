"""The KV cache of a layer on an NVIDIA GPU.

A KVCache is (kv[:, 0], kv[:, 1]) of one allocation kv_B2KSD: a block is one piece of memory."""

import torch

from kernels.interface.operations import KVCache


def allocate_kv_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCache:
    """The zeroed cache of one layer. Raises ValueError: a block size that is not a power of two."""
    if block_size & (block_size - 1) or block_size < 1:
        raise ValueError(
            f"block size {block_size} is not a power of two; choose --block-size 16, 32, 64 or 128"
        )
    shape = (num_blocks, 2, num_kv_heads, block_size, head_size)
    return _views(torch.zeros(shape, dtype=dtype, device=device))


def whole_cache(kv_cache: KVCache) -> torch.Tensor:
    """The allocation [B, 2, K, S, D] that the two views are of: the same memory.
    Raises ValueError: they are not the two views of one allocation."""
    keys_BKSD, values_BKSD = kv_cache
    _, K, S, D = keys_BKSD.shape
    half = K * S * D
    is_ours = keys_BKSD.shape == values_BKSD.shape and (
        keys_BKSD.stride() == values_BKSD.stride() == (2 * half, S * D, D, 1)
    )
    if not is_ours or values_BKSD.data_ptr() - keys_BKSD.data_ptr() != half * keys_BKSD.itemsize:
        raise ValueError(
            f"keys {list(keys_BKSD.shape)} with strides {list(keys_BKSD.stride())} and values "
            f"{list(values_BKSD.shape)} with strides {list(values_BKSD.stride())} are not views of "
            "one cache; allocate it with allocate_kv_cache of this backend"
        )
    return keys_BKSD.as_strided(
        (keys_BKSD.shape[0], 2, K, S, D), (2 * half, half, S * D, D, 1), keys_BKSD.storage_offset()
    )


def read_kv_cache(kv_cache: KVCache, slots_L: torch.Tensor) -> KVCache:
    """See `Operations.read_kv_cache`."""
    keys_BKSD, values_BKSD = kv_cache
    block_size = keys_BKSD.shape[2]
    blocks_L, offsets_L = slots_L // block_size, slots_L % block_size
    return keys_BKSD[blocks_L, :, offsets_L], values_BKSD[blocks_L, :, offsets_L]


def _views(kv_B2KSD: torch.Tensor) -> KVCache:
    return kv_B2KSD[:, 0], kv_B2KSD[:, 1]
