"""Formats of the KV cache that the native library reads: float32, bfloat16, or int8 with scales.

`src/kv_cache.h` draws them. A cache of int8 is a uint8 tensor [B, S, K, D + 4]: the codes of a
head, then their float32 scale `max|x| / 127`. So a block carries its scales wherever it is copied.
Keys of float32 lie in panels [B, S / 16, K, D, 16] where blocks are whole panels.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch

_SCALE_BYTES = 4
_PANEL_TOKENS = 16


class KVCacheFormat(IntEnum):
    """The formats of `src/kv_cache.h`, by its numbers."""

    F32 = 0
    BF16 = 1
    I8 = 2


_FORMAT_OF_DTYPE = {
    torch.float32: KVCacheFormat.F32,
    torch.bfloat16: KVCacheFormat.BF16,
    torch.int8: KVCacheFormat.I8,
}
_FORMAT_OF_STORAGE = {
    torch.float32: KVCacheFormat.F32,
    torch.bfloat16: KVCacheFormat.BF16,
    torch.uint8: KVCacheFormat.I8,
}


def format_of_dtype(kv_dtype: torch.dtype) -> KVCacheFormat | None:
    """The format of `kv_dtype`; None: the library has none."""
    return _FORMAT_OF_DTYPE.get(kv_dtype)


def format_of_cache(cache_BSKD: torch.Tensor) -> KVCacheFormat | None:
    """The format of a tensor of the cache; None: not the library's."""
    return _FORMAT_OF_STORAGE.get(cache_BSKD.dtype)


def keys_shape(kv_format: KVCacheFormat, values_shape: Sequence[int]) -> tuple[int, ...]:
    """Of the keys' tensor beside one of values [B, S, K, D]."""
    num_blocks, block_size, num_heads, length = values_shape
    if kv_format is not KVCacheFormat.F32 or block_size % _PANEL_TOKENS:
        return num_blocks, block_size, num_heads, length
    return num_blocks, block_size // _PANEL_TOKENS, num_heads, length, _PANEL_TOKENS


def keys_at(keys: torch.Tensor, slots_T: torch.Tensor) -> tuple[torch.Tensor | slice, ...]:
    """What indexes [T, K, D] of a tensor of keys in panels, of S slots a block."""
    panels_T = slots_T // _PANEL_TOKENS
    block_panels = keys.shape[1]
    every = slice(None)
    return panels_T // block_panels, panels_T % block_panels, every, every, slots_T % _PANEL_TOKENS


def row_length(kv_format: KVCacheFormat, head_size: int) -> int:
    """Last dimension of the cache's tensors."""
    return head_size + _SCALE_BYTES if kv_format is KVCacheFormat.I8 else head_size


def head_size_of(cache_BSKD: torch.Tensor) -> int:
    """D of a cache of any format."""
    length = cache_BSKD.shape[3]
    return length - _SCALE_BYTES if cache_BSKD.dtype is torch.uint8 else length


def store_rows(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """float32 [..., D] as the cache `like` keeps them."""
    if like.dtype is not torch.uint8:
        return rows.to(like.dtype)
    rows = rows.contiguous()
    scales = rows.abs().amax(dim=-1, keepdim=True) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = torch.round(rows / torch.where(scales > 0, scales, 1.0))
    codes = torch.where(scales.isnan(), 1.0, codes).clamp(-127, 127).to(torch.int8)
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def read_rows(stored: torch.Tensor) -> torch.Tensor:
    """What a cache keeps, [..., D] or [..., D + 4], as float32 [..., D]."""
    if stored.dtype is not torch.uint8:
        return stored.float()
    size = stored.shape[-1] - _SCALE_BYTES
    scales = stored[..., size:].contiguous().view(torch.float32)
    return stored[..., :size].view(torch.int8).float() * scales
