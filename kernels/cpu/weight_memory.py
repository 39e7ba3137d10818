"""Memory for packed weights, on huge pages where the system gives them. Loads no torch by itself,
so that the system can clear pages while torch is imported."""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_HUGE_PAGE_BYTES = 2 << 20
_CHUNK_BYTES = 32 << 20
_LINE_BYTES = 64
_TOUCHED_AT_ONCE = 16 << 20
"""Bytes: the most that `reserve` waits for."""


class WeightMemory:
    """On 4 KiB pages a core loses a fifth (float32) to a third (int8) of its bandwidth, measured
    with 49152 x 576 weights. Small weights share a chunk, which is freed with the last of them."""

    def __init__(self) -> None:
        self.chunk: mmap.mmap | None = None
        self.used = self._end = 0
        self._toucher: threading.Thread | None = None
        self._is_wanted = threading.Event()

    def touch_ahead(
        self, num_bytes: int, *, needed_bytes: int, after: threading.Thread | None = None
    ) -> None:
        """Let a thread touch the first of the memory that weights will need, until some of it is
        reserved: the system takes longer to clear it than packing takes. Called before `reserve`,
        and `give_back` when all weights are packed. `after`: begin when this thread has ended."""
        with contextlib.suppress(MemoryError):  # `reserve` asks for less at a time
            pages = self._take_chunk(needed_bytes)[:num_bytes]
            self._toucher = threading.Thread(target=self._touch, args=(pages, after), daemon=True)
            self._toucher.start()

    def reserve(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes] of any content, its first byte aligned to 64.
        Raises MemoryError: the system has not so much."""
        import torch  # loaded by then

        self.end_touching()
        if self.chunk is None or num_bytes > self._end - self.used:
            self._take_chunk(max(num_bytes, _CHUNK_BYTES))
        assert self.chunk is not None, "there is no memory, and no MemoryError"
        start, self.used = self.used, self.used + -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return torch.frombuffer(self.chunk, dtype=torch.uint8, count=num_bytes, offset=start)

    def give_back(self) -> None:
        """Give the system back what was touched and is not reserved."""
        self.end_touching()
        start = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.chunk is not None and start < self._end:
            self.chunk.madvise(mmap.MADV_DONTNEED, start)
        self.chunk, self.used, self._end = None, 0, 0

    def _take_chunk(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Untouched, from the beginning of a huge page on, and advised to consist of them."""
        import numpy as np  # `engine-core doctor` needs none

        try:
            chunk = mmap.mmap(
                -1, num_bytes + _HUGE_PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except OSError as error:
            raise MemoryError(f"{num_bytes >> 20} MiB for weights: {error}") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # without it nothing changes but the speed
                chunk.madvise(mmap.MADV_HUGEPAGE)
        pages = np.frombuffer(chunk, np.uint8)
        start = -pages.ctypes.data % _HUGE_PAGE_BYTES
        self.chunk, self.used, self._end = chunk, start, start + num_bytes
        return pages[start : self._end]

    def _touch(self, pages: npt.NDArray[np.uint8], after: threading.Thread | None) -> None:
        if after is not None:
            after.join()
        for start in range(0, len(pages), _TOUCHED_AT_ONCE):
            if self._is_wanted.is_set():
                return
            # without the interpreter's lock
            pages[start : start + _TOUCHED_AT_ONCE : mmap.PAGESIZE] = 0

    def end_touching(self) -> None:
        if self._toucher is not None:
            self._is_wanted.set()
            self._toucher.join()
            self._toucher = None


WEIGHT_MEMORY = WeightMemory()
"""The memory for weights of this process."""
