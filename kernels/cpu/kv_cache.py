"""Formats of the KV cache that the native library reads: float32, bfloat16, or int8 with scales.

`src/kv_cache.h` draws them. A cache of int8 is a uint8 tensor [B, S, K, D + 4]: the codes of a
head, then their float32 scale `max|x| / 127`. So a block carries its scales wherever it is copied.
Where blocks are whole panels of 16 tokens, keys of float32 lie in panels [B, S / 16, K, D, 16],
and keys and values of int8, of heads of whole sixteens, in panels [B, S / 16, K, D / 4 + 1, 64]:
of keys [D / 4][16 tokens][4] codes + 128, of values [4][D][4 tokens] codes, then 16 scales.
Keys with values in them lie in rows.
"""

from enum import IntEnum

import torch

from kernels.interface.kv_cache import KVCache, KVShape

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


def format_of(kv_dtype: torch.dtype) -> KVCacheFormat | None:
    """The format of `kv_dtype`; None: the library has none."""
    return _FORMAT_OF_DTYPE.get(kv_dtype)


def view_kv_cache(blocks_BN: torch.Tensor, shape: KVShape) -> KVCache:
    """See `Operations.view_kv_cache`. Raises ValueError: keys and values of unlike sizes, or values
    in keys of int8."""
    if shape.values_in_keys:
        if shape.dtype is torch.int8:
            raise ValueError("latents are not kept in int8; choose --kv-cache-dtype bfloat16")
        keys = shape.split(blocks_BN)[0].view(len(blocks_BN), *block_shapes(shape)[0])
        behind = blocks_BN[:, shape.key_bytes :]
        index = view_kv_cache(behind, shape.index) if shape.index_size else None
        return KVCache(keys, keys[..., -shape.value_size :], shape, index)
    if shape.key_size != shape.value_size:
        raise ValueError(f"keys of {shape.key_size} and values of {shape.value_size} elements")
    stored = torch.uint8 if shape.dtype is torch.int8 else shape.dtype
    parts = shape.split(blocks_BN, stored)
    keys, values = (
        part.view(len(part), *own) for part, own in zip(parts, block_shapes(shape), strict=True)
    )
    return KVCache(keys, values, shape)


def block_shapes(shape: KVShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a block's keys and values, in a dtype of a known format."""
    if shape.values_in_keys:
        slots = shape.block_size, shape.num_kv_heads
        return (*slots, shape.key_size), (*slots, shape.value_size)
    panels = shape.block_size // _PANEL_TOKENS, shape.num_kv_heads
    is_whole, size = shape.block_size % _PANEL_TOKENS == 0, shape.key_size
    is_bytes = shape.dtype is torch.int8
    if is_bytes and is_whole and size % 16 == 0:
        own = *panels, size // 4 + 1, _LINE_BYTES
        return own, own
    rows = shape.block_size, shape.num_kv_heads, size + (_SCALE_BYTES if is_bytes else 0)
    if shape.dtype is torch.float32 and is_whole:
        return (*panels, size, _PANEL_TOKENS), rows
    return rows, rows


def write_slots(
    cache: torch.Tensor, slots_T: torch.Tensor, rows_TKD: torch.Tensor, *, are_keys: bool
) -> None:
    """float32 rows, to slots of the keys or the values of a cache."""
    if cache.dtype is not torch.uint8:
        cache[_index(cache, slots_T)] = rows_TKD.to(cache.dtype)
        return
    codes_TKD, scales_TK1 = _as_bytes(rows_TKD)
    if cache.dim() == 4:
        stored = torch.cat([codes_TKD.view(torch.uint8), scales_TK1.view(torch.uint8)], dim=-1)
        cache[_index(cache, slots_T)] = stored
        return
    codes, index, scales, scale_index = _panels_of(cache, slots_T, are_keys=are_keys)
    own = codes_TKD.view(torch.uint8)
    num_tokens, num_heads, size = own.shape
    codes[index] = own.view(num_tokens, num_heads, size // 4, 4) ^ 0x80 if are_keys else own
    scales[scale_index] = scales_TK1[..., 0]


def read_slots(cache: torch.Tensor, slots_L: torch.Tensor, *, are_keys: bool) -> torch.Tensor:
    """[L, K, D] of the keys or the values of a cache: of int8 as float32, else as they are."""
    if cache.dtype is not torch.uint8:
        return cache[_index(cache, slots_L)]
    if cache.dim() == 4:
        stored = cache[_index(cache, slots_L)]
        scales_LK1 = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
        return stored[..., :-_SCALE_BYTES].view(torch.int8).float() * scales_LK1
    codes, index, scales, scale_index = _panels_of(cache, slots_L, are_keys=are_keys)
    own = (codes[index] ^ 0x80).flatten(-2) if are_keys else codes[index]
    return own.view(torch.int8).float() * scales[scale_index][..., None]


_Index = tuple[torch.Tensor | slice, ...]
_EVERY = slice(None)


def _places(
    cache: torch.Tensor, slots_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks, panels in them and tokens in these, of a cache in panels."""
    panels_T, num_panels = slots_T // _PANEL_TOKENS, cache.shape[1]
    return panels_T // num_panels, panels_T % num_panels, slots_T % _PANEL_TOKENS


def _index(cache: torch.Tensor, slots_T: torch.Tensor) -> _Index:
    """The indices of [T, K, D] of a cache of floats, or of rows."""
    if cache.dim() == 4:
        return slots_T // cache.shape[1], slots_T % cache.shape[1]
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
