"""Pages of a KV cache in host memory, asked of the system before prompts write them. A virtual
machine may wait for its host at each: 0.6 GB/s, where a page that is there is written at 10."""

import ctypes
import logging
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Sequence

import torch

from engine_core.model_runner.config import RunnerConfig
from kernels.interface.operations import KVCache

logger = logging.getLogger(__name__)

_MOST_TOKENS, _MOST_BYTES = 32768, 1 << 30
"""Of a cache whose memory nobody gave: the rest comes as it is written."""
_POPULATE_WRITE = 23  # of madvise: as if each page were written, but its contents stay
_STRIDE_BYTES = 4 << 20
_NICENESS = 10
"""A tenth of a core that others want, too: the step that shares it waits little, and it ends."""
_SET_NAME, _NAME = 15, b"cache-pages"  # of prctl: what `top -H` shows


def num_blocks_ahead(config: RunnerConfig) -> int:
    """Of a cache whose memory nobody gave, the first blocks, with the null block."""
    num_blocks = config.num_groups * -(-_MOST_TOKENS // config.block_size)
    return min(config.num_blocks, num_blocks, _MOST_BYTES // config.block_bytes) + 1


def populate_cache(tensors: Sequence[KVCache], num_blocks: int) -> threading.Thread | None:
    """Let a thread of low priority take the pages of the first blocks, a few of each tensor
    [B, ...] at a time. Returns it, or None where the system cannot."""
    if sys.platform != "linux":
        return None
    # neither cache nor engine shall outlive their end for it
    parts = [(weakref.ref(part), part[:num_blocks].nbytes) for pair in tensors for part in pair]
    thread = threading.Thread(target=_populate, args=(parts,), name=_NAME.decode(), daemon=True)
    thread.start()
    return thread


def _populate(parts: list[tuple[weakref.ref[torch.Tensor], int]]) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_SET_NAME, _NAME)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    madvise = library.madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in range(0, max(num_bytes for _, num_bytes in parts), _STRIDE_BYTES):
        for reference, num_bytes in parts:
            tensor = reference()
            if tensor is None:
                return
            first = (tensor.data_ptr() + start) // mmap.PAGESIZE * mmap.PAGESIZE
            stop = tensor.data_ptr() + min(start + _STRIDE_BYTES, num_bytes)
            length = (stop - first) // mmap.PAGESIZE * mmap.PAGESIZE
            if length > 0 and madvise(first, length, _POPULATE_WRITE):
                reason = os.strerror(ctypes.get_errno())  # a Linux before 5.14, or little memory
                logger.debug("the KV cache's pages come as they are written: %s", reason)
                return
