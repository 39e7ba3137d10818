"""Formats of the KV cache that the native library reads: float32, bfloat16, or int8 with scales.

`src/kv_cache.h` draws them. A cache of int8 is a uint8 tensor [B, S, K, D + 4]: the codes of a
head, then their float32 scale `max|x| / 127`. So a block carries its scales wherever it is copied.
Where blocks are whole panels of 16 tokens, keys of float32 lie in panels [B, S / 16, K, D, 16],
and keys and values of int8, of heads of whole sixteens, in panels [B, S / 16, K, D / 4 + 1, 64]:
of keys [D / 4][16 tokens][4] codes + 128, of values [4][D][4 tokens] codes, then 16 scales.
"""

from enum import IntEnum

import torch

_SCALE_BYTES = 4
_PANEL_TOKENS = 16
_LINE_BYTES = 4 * _PANEL_TOKENS


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


def cache_shapes(
    kv_format: KVCacheFormat, num_blocks: int, block_size: int, num_heads: int, head_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the tensors of keys and of values."""
    panels = num_blocks, block_size // _PANEL_TOKENS, num_heads
    is_whole = block_size % _PANEL_TOKENS == 0
    if kv_format is KVCacheFormat.I8 and is_whole and head_size % 16 == 0:
        shape = *panels, head_size // 4 + 1, _LINE_BYTES
        return shape, shape
    rows = num_blocks, block_size, num_heads, row_length(kv_format, head_size)
    if kv_format is KVCacheFormat.F32 and is_whole:
        return (*panels, head_size, _PANEL_TOKENS), rows
    return rows, rows


def row_length(kv_format: KVCacheFormat, head_size: int) -> int:
    """Elements of a head of one token, with its scale."""
    return head_size + _SCALE_BYTES if kv_format is KVCacheFormat.I8 else head_size


def _has_byte_panels(cache: torch.Tensor) -> bool:
    return cache.dtype is torch.uint8 and cache.dim() == 5


def block_size_of(values: torch.Tensor) -> int:
    """S of a cache of any format, from its values."""
    return values.shape[1] * (_PANEL_TOKENS if _has_byte_panels(values) else 1)


def head_size_of(values: torch.Tensor) -> int:
    """D of a cache of any format, from its values."""
    if _has_byte_panels(values):
        return 4 * (values.shape[3] - 1)
    return values.shape[3] - (_SCALE_BYTES if values.dtype is torch.uint8 else 0)


def write_slots(
    cache: torch.Tensor, slots_T: torch.Tensor, rows_TKD: torch.Tensor, *, are_keys: bool
) -> None:
    """float32 rows, to slots of the keys or the values of a cache."""
    if cache.dtype is not torch.uint8:
        _slots_of(cache)[_index(cache, slots_T)] = rows_TKD.to(cache.dtype)
        return
    codes_TKD, scales_TK1 = _as_bytes(rows_TKD)
    if cache.dim() == 4:
        stored = torch.cat([codes_TKD.view(torch.uint8), scales_TK1.view(torch.uint8)], dim=-1)
        cache.flatten(0, 1)[slots_T] = stored
        return
    codes, index, scales, scale_index = _panels_of(cache, slots_T, are_keys=are_keys)
    own = codes_TKD.view(torch.uint8)
    num_tokens, num_heads, size = own.shape
    codes[index] = own.view(num_tokens, num_heads, size // 4, 4) ^ 0x80 if are_keys else own
    scales[scale_index] = scales_TK1[..., 0]


def read_slots(cache: torch.Tensor, slots_L: torch.Tensor, *, are_keys: bool) -> torch.Tensor:
    """[L, K, D] of the keys or the values of a cache: of int8 as float32, else as they are."""
    if cache.dtype is not torch.uint8:
        return _slots_of(cache)[_index(cache, slots_L)]
    if cache.dim() == 4:
        stored = cache.flatten(0, 1)[slots_L]
        scales_LK1 = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
        return stored[..., :-_SCALE_BYTES].view(torch.int8).float() * scales_LK1
    codes, index, scales, scale_index = _panels_of(cache, slots_L, are_keys=are_keys)
    own = (codes[index] ^ 0x80).flatten(-2) if are_keys else codes[index]
    return own.view(torch.int8).float() * scales[scale_index][..., None]


_Index = tuple[torch.Tensor | slice, ...]
_EVERY = slice(None)


def _slots_of(cache: torch.Tensor) -> torch.Tensor:
    return cache if cache.dim() == 5 else cache.flatten(0, 1)


def _places(
    cache: torch.Tensor, slots_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, panels in them and tokens in these, of a cache in panels."""
    panels_T, num_panels = slots_T // _PANEL_TOKENS, cache.shape[1]
    return panels_T // num_panels, panels_T % num_panels, slots_T % _PANEL_TOKENS


def _index(cache: torch.Tensor, slots_T: torch.Tensor) -> _Index:
    """The indices of [T, K, D] of a cache of floats."""
    if cache.dim() == 4:
        return (slots_T,)
    blocks_T, panels_T, lanes_T = _places(cache, slots_T)
    return blocks_T, panels_T, _EVERY, _EVERY, lanes_T


def _panels_of(
    cache: torch.Tensor, slots_T: torch.Tensor, *, are_keys: bool
) -> tuple[torch.Tensor, _Index, torch.Tensor, _Index]:
    """Codes of panels of bytes and what indexes their [T, K, D / 4, 4] (keys) or [T, K, D], scales
    [B, S / 16, K, 16] and what indexes their [T, K]."""
    blocks_T, panels_T, lanes_T = _places(cache, slots_T)
    at = blocks_T, panels_T, _EVERY
    scales = cache[..., -1, :].view(torch.float32)
    if are_keys:
        codes = cache[..., :-1, :].view(*cache.shape[:3], -1, _PANEL_TOKENS, 4)
        return codes, (*at, _EVERY, lanes_T), scales, (*at, lanes_T)
    codes = cache[..., :-1, :].view(*cache.shape[:3], 4, -1, 4)
    return codes, (*at, lanes_T // 4, _EVERY, lanes_T % 4), scales, (*at, lanes_T)


def _as_bytes(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [..., D] as codes int8 [..., D] and scales float32 [..., 1]."""
    rows = rows.contiguous()
    scales = rows.abs().amax(dim=-1, keepdim=True) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = torch.round(rows / torch.where(scales > 0, scales, 1.0))
    codes = torch.where(scales.isnan(), 1.0, codes).clamp(-127, 127).to(torch.int8)
    return codes, scales
