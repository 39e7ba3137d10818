"""The KV cache of a layer on an NVIDIA GPU, and copies of whole blocks.

A KVCache is (kv[:, 0], kv[:, 1]) of one allocation kv_B2KSD: a block is one piece of memory."""

import torch
import triton
import triton.language as tl

from kernels.interface.operations import KVCache

_BLOCK_W = 2048
"""Words of 8 bytes a program."""
_NUM_WARPS = 8


def copy_blocks_reference(
    kv_cache_B2KSD: torch.Tensor, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    """`cache[dst[i]] = cache[src[i]]`, all read before any is written, in torch."""
    words_BW = _as_words(kv_cache_B2KSD)
    words_BW[dst_ids_N] = words_BW[src_ids_N]


@triton.jit
def copy_blocks_kernel(
    cache_ptr,  # int64 [B, W], the bytes of a block as words
    src_ids_ptr,  # int64 [N]
    dst_ids_ptr,  # int64 [N], none of them in src_ids
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    pair = tl.program_id(0)
    word_W = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    src = tl.load(src_ids_ptr + pair)
    dst = tl.load(dst_ids_ptr + pair)
    block_W = tl.load(cache_ptr + src * W + word_W, mask=word_W < W, other=0)
    tl.store(cache_ptr + dst * W + word_W, block_W, mask=word_W < W)


def copy_within(
    kv_cache_B2KSD: torch.Tensor, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    """`cache[dst_ids[i]] = cache[src_ids[i]]`, keys and values.

    A destination may be another pair's source; those (rare) calls go through a second buffer.
    Raises ValueError: ids out of range, twice in dst_ids_N, or a cache of the wrong form.

    Args:
        kv_cache_B2KSD: contiguous, of any dtype; changed in place.
        src_ids_N, dst_ids_N: int64 on the CPU; each of dst_ids_N once.
    """
    _check_cache(kv_cache_B2KSD)
    _check_ids(src_ids_N, kv_cache_B2KSD, dst_ids_N, kv_cache_B2KSD)
    if not src_ids_N.numel():
        return
    is_disjoint = not set(src_ids_N.tolist()) & set(dst_ids_N.tolist())
    device, words_BW = kv_cache_B2KSD.device, _as_words(kv_cache_B2KSD)
    src_ids, dst_ids = (ids.to(device, non_blocking=True) for ids in (src_ids_N, dst_ids_N))
    if not is_disjoint:
        words_BW.index_copy_(0, dst_ids, words_BW.index_select(0, src_ids))
        return
    num_words = words_BW.shape[1]
    copy_blocks_kernel[(src_ids.numel(), triton.cdiv(num_words, _BLOCK_W))](
        words_BW, src_ids, dst_ids, W=num_words, BLOCK_W=_BLOCK_W, num_warps=_NUM_WARPS
    )


def swap_blocks(
    src: torch.Tensor, dst: torch.Tensor, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    """`dst[dst_ids[i]] = src[src_ids[i]]` of two caches, one of them in host memory.

    One copy for each run of pairs in which both ids rise by one, on the current stream. The host's
    memory must be pinned for the copies to overlap with work on the device. Returns before they are
    done. Raises ValueError: ids out of range or twice in dst_ids_N, one cache given as both source
    and destination, or caches that do not fit each other.

    Args:
        src, dst: [B, 2, K, S, D], contiguous; the number of blocks may differ. dst is changed in
            place.
        src_ids_N, dst_ids_N: int64 on the CPU; each of dst_ids_N once.
    """
    _check_cache(src)
    _check_cache(dst)
    if src.shape[1:] != dst.shape[1:] or src.dtype != dst.dtype:
        raise ValueError(
            f"blocks of {src.dtype} {list(src.shape[1:])} cannot be copied to "
            f"{dst.dtype} {list(dst.shape[1:])}; allocate both tiers alike"
        )
    if src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr():
        raise ValueError("source and destination are one cache; use copy_within")
    _check_ids(src_ids_N, src, dst_ids_N, dst)
    for src_start, dst_start, length in runs_of(src_ids_N, dst_ids_N):
        piece = src[src_start : src_start + length]
        dst[dst_start : dst_start + length].copy_(piece, non_blocking=True)


def runs_of(src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor) -> list[tuple[int, int, int]]:
    """(first source, first destination, length) of the longest runs in which both rise by one.

    src  7 3 4 5        runs  (3, 0, 2) (5, 9, 1) (7, 2, 1)
    dst  2 0 1 9
    """
    runs: list[tuple[int, int, int]] = []
    for src, dst in sorted(zip(src_ids_N.tolist(), dst_ids_N.tolist(), strict=True)):
        if runs:
            src_start, dst_start, length = runs[-1]
            if (src, dst) == (src_start + length, dst_start + length):
                runs[-1] = (src_start, dst_start, length + 1)
                continue
        runs.append((src, dst, 1))
    return runs


def _as_words(kv_cache_B2KSD: torch.Tensor) -> torch.Tensor:
    """The cache as int64 [B, W], the same memory: bytes have no dtype."""
    return kv_cache_B2KSD.view(kv_cache_B2KSD.shape[0], -1).view(torch.int64)


def _check_cache(cache: torch.Tensor) -> None:
    block_bytes = cache.shape[1:].numel() * cache.element_size()
    if cache.dim() != 5 or cache.shape[1] != 2 or not cache.is_contiguous() or block_bytes % 8:
        raise ValueError(
            f"a cache has shape {list(cache.shape)} and strides {list(cache.stride())}; "
            "make it [B, 2, K, S, D], contiguous, a block a multiple of 8 bytes"
        )


def _check_ids(
    src_ids_N: torch.Tensor, src: torch.Tensor, dst_ids_N: torch.Tensor, dst: torch.Tensor
) -> None:
    for name, ids, cache in (("src_ids_N", src_ids_N, src), ("dst_ids_N", dst_ids_N, dst)):
        if ids.dim() != 1 or ids.dtype != torch.int64 or ids.device.type != "cpu":
            raise ValueError(
                f"{name} is {ids.dtype} {list(ids.shape)} on {ids.device}; make it int64 [N] on "
                "the CPU"
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < cache.shape[0]:
            raise ValueError(
                f"{name} spans {int(ids.min())}..{int(ids.max())}, the cache has blocks "
                f"0..{cache.shape[0] - 1}"
            )
    if src_ids_N.shape != dst_ids_N.shape:
        raise ValueError(f"{src_ids_N.numel()} sources, {dst_ids_N.numel()} destinations")
    if len(set(dst_ids_N.tolist())) != dst_ids_N.numel():
        raise ValueError("a block stands twice in dst_ids_N; keep the last of its pairs")


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


def allocate_host_kv_cache(like: KVCache, num_blocks: int) -> KVCache:
    """See `Operations.allocate_host_kv_cache`."""
    whole_B2KSD = whole_cache(like)
    return _views(
        torch.empty(
            (num_blocks, *whole_B2KSD.shape[1:]),
            dtype=whole_B2KSD.dtype,
            pin_memory=whole_B2KSD.device.type == "cuda",
        )
    )


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


def copy_blocks(
    src: KVCache, dst: KVCache, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor
) -> None:
    """See `Operations.copy_blocks`. Between a GPU and pinned host memory the copies are
    only queued, on the current stream: other work of that stream sees them done."""
    if not src_ids_N.numel() and not dst_ids_N.numel():
        return
    src_whole, dst_whole = whole_cache(src), whole_cache(dst)
    if src_whole.data_ptr() == dst_whole.data_ptr():
        copy_within(dst_whole, src_ids_N, dst_ids_N)
    else:
        swap_blocks(src_whole, dst_whole, src_ids_N, dst_ids_N)


def _views(kv_B2KSD: torch.Tensor) -> KVCache:
    return kv_B2KSD[:, 0], kv_B2KSD[:, 1]
