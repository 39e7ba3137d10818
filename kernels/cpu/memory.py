"""Memory for packed weights, on huge pages where the system gives them.

Owns the chunks. Must not know what lies in them.

Reading a weight once from end to end is what a step with few rows does: on 4 KiB pages a core
loses a fifth (float32) to a third (int8) of its bandwidth, measured with 49152 x 576 weights.
Chunks are shared, so that a small weight need not fill a huge page of its own.
"""

from __future__ import annotations

import ctypes

import torch

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 32 << 20
_LINE_BYTES = 64
_MADV_HUGEPAGE = 14


class WeightMemory:
    """Hands out memory that is given back when all weights of a chunk are gone."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of any content, its first byte aligned to 64."""
        if num_bytes > self._chunk.numel() - self._used:
            self._chunk = _huge_pages(max(num_bytes, _CHUNK_BYTES))
            self._used = 0
        reserved = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return reserved


def _huge_pages(num_bytes: int) -> torch.Tensor:
    """Untouched memory that begins at a huge page and is advised to consist of them."""
    raw = torch.empty(num_bytes + _HUGE_PAGE_BYTES, dtype=torch.uint8)
    chunk = raw[-raw.data_ptr() % _HUGE_PAGE_BYTES :][:num_bytes]
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None:  # advice: a system without it changes nothing but the speed
        madvise(ctypes.c_void_p(chunk.data_ptr()), ctypes.c_size_t(num_bytes), _MADV_HUGEPAGE)
    return chunk
