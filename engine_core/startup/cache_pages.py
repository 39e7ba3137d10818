"""Pages of a KV cache in host memory, asked of the system before prompts write them. A virtual
machine may wait for its host at each: 0.6 GB/s, where a page that is there is written at 10."""

import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
import time
import weakref
from collections.abc import Callable

import torch

from engine_core.model_runner.config import RunnerConfig
from protocol.memory import available_memory_bytes

logger = logging.getLogger(__name__)

_MOST_TOKENS, _LEAST_BYTES, _MOST_BYTES = 32768, 32 << 20, 1 << 30
"""Of what is ahead of the blocks in use, without --kv-cache-memory."""
_PART = 512
"""The part of the free memory that is ahead, between these bytes."""
_POPULATE_WRITE = 23  # of madvise: as if each page were written, but its contents stay
_STRIDE_BYTES = 256 << 10
"""Bytes taken at a time: others wait meanwhile for the memory map, 0.4 ms at 0.6 GB/s."""
_POLL_S = 0.5
"""Seconds between two looks at how many blocks are in use."""
_SHARE = 0.2
"""Of a core, for the thread. It rests between, and has no low priority: the end of a process waits
for its last thread, which frees the memory. Of low priority it would do so minutes later, where
others want all cores."""
_TAKING = threading.Lock()
"""Held while pages are taken, which keeps a cache that others have forgotten."""
_SET_MEMPOLICY, _INTERLEAVE = {"x86_64": 238, "aarch64": 237}, 3
"""The number of that system call by processor, and the policy that spreads pages over all nodes."""
_SET_NAME, _NAME = 15, b"cache-pages"  # of prctl: what `top -H` shows


def num_blocks_ahead(config: RunnerConfig, pool: int, *, is_given: bool) -> int:
    """Blocks to take ahead of those of a pool in use, without --kv-cache-memory; the null block
    counts. `is_given`: --num-blocks says how many there are, so that most of them will be used."""
    layout, num_blocks = config.layout, -(-_MOST_TOKENS // config.block_size)
    num_ahead = num_blocks * sum(spec.pool == pool for spec in layout.group_specs)
    ahead_bytes = _MOST_BYTES if is_given else available_memory_bytes() // _PART
    ahead_bytes = min(max(ahead_bytes, _LEAST_BYTES), _MOST_BYTES)
    most = ahead_bytes // len(layout.pool_bytes) // layout.pool_bytes[pool]
    return min(config.block_ids.sizes[pool], num_ahead, most) + 1


def populate_cache(
    blocks: torch.Tensor,
    num_ahead: int,
    num_filled: Callable[[], int],
    *,
    is_spread: bool = False,
) -> threading.Thread | None:
    """Let a thread take the pages of the first `num_filled() + num_ahead` blocks [B, bytes], a few
    at a time with rests between, until it has all or they are gone. Returns it, or None where the
    system cannot.

    Args:
        num_filled: how many blocks are in use or cached now. Never written ones are allocated in
            order, after all others that are empty: the most there were says which come next.
        is_spread: the pages lie in turn on all nodes of memory.
    """
    if sys.platform != "linux":
        return None
    # neither cache nor engine shall outlive their end for it
    stride = max(1, _STRIDE_BYTES // blocks.shape[1])
    thread = threading.Thread(
        target=_populate,
        args=(weakref.ref(blocks), len(blocks), stride, num_ahead, num_filled, is_spread),
        name=_NAME.decode(),
        daemon=True,
    )
    thread.start()
    return thread


def end_taking() -> None:
    """Wait until no thread holds a cache that all others have forgotten."""
    with _TAKING:
        pass


def _populate(
    blocks: weakref.ref[torch.Tensor],
    num_blocks: int,
    stride: int,
    num_ahead: int,
    num_filled: Callable[[], int],
    is_spread: bool,
) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_SET_NAME, _NAME)
    if is_spread and (number := _SET_MEMPOLICY.get(platform.machine())) is not None:
        every_node = ctypes.c_ulong(2**64 - 1)
        library.syscall(number, _INTERLEAVE, ctypes.byref(every_node), 65)
    madvise = library.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_taken = 0
    while num_taken < num_blocks:
        wanted = min(num_blocks, num_filled() + num_ahead)
        if wanted <= num_taken:
            time.sleep(_POLL_S)
        stop = min(wanted, num_taken + stride)
        begun_s = time.monotonic()
        with _TAKING:
            if not _take_pages(blocks(), num_taken, stop, madvise):
                return
        num_taken = max(num_taken, stop)
        time.sleep((time.monotonic() - begun_s) * (1 / _SHARE - 1))


def _take_pages(
    blocks: torch.Tensor | None, first: int, stop: int, madvise: Callable[[int, int, int], int]
) -> bool:
    """Take the pages of blocks [first, stop), maybe none. False: there is no more to do."""
    if blocks is None:
        return False
    begin, end = (
        (blocks.data_ptr() + block * blocks.shape[1]) // mmap.PAGESIZE * mmap.PAGESIZE
        for block in (first, stop)
    )
    for at in range(begin, end, _STRIDE_BYTES):
        if madvise(at, min(_STRIDE_BYTES, end - at), _POPULATE_WRITE):
            reason = os.strerror(ctypes.get_errno())  # a Linux before 5.14, or little memory
            logger.debug("the KV cache's pages come as they are written: %s", reason)
            return False
    return True
