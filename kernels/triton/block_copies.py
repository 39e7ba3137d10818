"""Copies of KV blocks: within the device, and to and from host memory through staging memory.

    compute stream   gather ----+          step ...          +---- scatter   step ...
                                v staging                    | staging
    copy stream                 +---- copies to the host ... copies from the host

Blocks whose host ids follow one another travel as one piece."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from kernels.interface.kv_cache import check_ids
from kernels.triton.host_memory import pinned_memory

STAGING_BYTES = 32 * 1024**2
"""Of one of the two parts: while one travels, the other is filled or emptied."""
_BLOCK_W = 2048
"""Words of 8 bytes a program."""
NUM_WARPS = 8
Work = Callable[[], None]


class Lanes(Protocol):
    """Two queues of work on a device. Each carries out its own in order; `after`: what the other
    queue returned for work that must be done before. None: nothing."""

    def compute(self, work: Work, after: Any = None) -> Any: ...

    def travel(self, work: Work, after: Any = None) -> Any: ...


class InOrder:
    """Work in order on a CPU, which is done when it returns."""

    def compute(self, work: Work, after: Any = None) -> None:
        work()

    travel = compute


class CudaLanes:
    """The current stream, and one for copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)

    def compute(self, work: Work, after: Any = None) -> Any:
        return self._run(torch.cuda.current_stream(self._device), work, after)

    def travel(self, work: Work, after: Any = None) -> Any:
        return self._run(self._copies, work, after)

    def _run(self, stream: Any, work: Work, after: Any) -> Any:
        done = torch.cuda.Event()
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            work()
            done.record(stream)
        return done


@triton.jit
def move_blocks_kernel(
    src_ptr,  # int64 [., W]
    dst_ptr,  # int64 [., W]; may be src_ptr, if no destination is a source
    src_ids_ptr,  # int64 [N]
    dst_ids_ptr,  # int64 [N]
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program (pair, part of a block)."""
    pair = tl.program_id(0).to(tl.int64)
    word_W = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside_W = word_W < W
    from_W = src_ptr + tl.load(src_ids_ptr + pair) * W + word_W
    to_W = dst_ptr + tl.load(dst_ids_ptr + pair) * W + word_W
    tl.store(to_W, tl.load(from_W, mask=inside_W), mask=inside_W)


class _Part:
    """Of the staging memory. `free`: done when nothing reads or writes it."""

    def __init__(self, num_blocks: int, num_words: int, device: torch.device) -> None:
        self.packed_NW = torch.empty(num_blocks, num_words, dtype=torch.int64, device=device)
        self.free: Any = None


class TritonBlockCopier:
    """See `kernels.interface.kv_cache.BlockCopier`. Not for the inside of a CUDA graph.

    Args:
        blocks_BN: uint8, each of whole words of 8 bytes.
        num_host_blocks: of the second tier; 0: none, and no staging memory.
        staging_bytes: of each of its two parts.
    """

    def __init__(
        self,
        blocks_BN: torch.Tensor,
        num_host_blocks: int,
        *,
        lanes: Lanes | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._words_BW = blocks_BN.view(torch.int64)
        device, num_words = blocks_BN.device, self._words_BW.shape[1]
        is_gpu = device.type == "cuda"
        self._lanes = lanes or (CudaLanes(device) if is_gpu else InOrder())
        self._host_HW = pinned_memory(num_host_blocks * num_words * 8, device).view(torch.int64)
        self._host_HW = self._host_HW.view(num_host_blocks, num_words)
        self.host_blocks = self._host_HW.view(torch.uint8)
        self._parts: list[_Part] = []
        if num_host_blocks:
            size = max(1, staging_bytes // (8 * num_words))
            self._parts = [_Part(size, num_words, device) for _ in range(2)]
            self._places = torch.arange(size, device=device)

    def copy(self, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor) -> None:
        """A destination may be another pair's source; those (rare) calls go through a second
        buffer."""
        words_BW = self._words_BW
        check_ids(src_ids_N, dst_ids_N, len(words_BW), len(words_BW))
        if not src_ids_N.numel():
            return
        src_ids, dst_ids = self._send(src_ids_N), self._send(dst_ids_N)
        if torch.isin(dst_ids_N, src_ids_N).any():
            words_BW.index_copy_(0, dst_ids, words_BW.index_select(0, src_ids))
        else:
            _move(words_BW, words_BW, src_ids, dst_ids)

    def swap_in(self, host_ids_N: torch.Tensor, block_ids_N: torch.Tensor) -> None:
        """The transfer may begin while an earlier step runs."""
        check_ids(host_ids_N, block_ids_N, len(self._host_HW), len(self._words_BW))
        for part, block_ids, runs in self._chunks(block_ids_N, host_ids_N):
            arrived = self._lanes.travel(self._travel_of(part, runs, to_host=False), part.free)

            def unpack(part: _Part = part, block_ids: torch.Tensor = block_ids) -> None:
                _move(part.packed_NW, self._words_BW, self._places[: len(block_ids)], block_ids)

            part.free = self._lanes.compute(unpack, arrived)

    def swap_out(self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor) -> None:
        """The transfer ends in the background; later ones wait for it."""
        check_ids(block_ids_N, host_ids_N, len(self._words_BW), len(self._host_HW))
        for part, block_ids, runs in self._chunks(block_ids_N, host_ids_N):

            def pack(part: _Part = part, block_ids: torch.Tensor = block_ids) -> None:
                _move(self._words_BW, part.packed_NW, block_ids, self._places[: len(block_ids)])

            gathered = self._lanes.compute(pack, part.free)
            part.free = self._lanes.travel(self._travel_of(part, runs, to_host=True), gathered)

    def _chunks(
        self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor
    ) -> Iterator[tuple[_Part, torch.Tensor, list[tuple[int, int, int]]]]:
        """(part, device blocks, runs) of as many pairs as a part holds, by rising host ids."""
        host_ids, order = host_ids_N.sort()
        block_ids = block_ids_N[order]
        if not len(host_ids):
            return
        size = len(self._parts[0].packed_NW)
        for chunk, ids in zip(block_ids.split(size), host_ids.split(size), strict=True):
            part = self._parts[0]
            self._parts.reverse()
            yield part, self._send(chunk), runs_of(ids.tolist())

    def _travel_of(self, part: _Part, runs: list[tuple[int, int, int]], *, to_host: bool) -> Work:
        def travel() -> None:
            for at, host_id, length in runs:
                here = part.packed_NW[at : at + length]
                there = self._host_HW[host_id : host_id + length]
                src, dst = (here, there) if to_host else (there, here)
                dst.copy_(src, non_blocking=True)

        return travel

    def _send(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.to(self._words_BW.device, non_blocking=True)


def _move(
    src_BW: torch.Tensor, dst_BW: torch.Tensor, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> None:
    num_words = src_BW.shape[1]
    move_blocks_kernel[len(dst_ids), triton.cdiv(num_words, _BLOCK_W)](
        src_BW, dst_BW, src_ids, dst_ids, W=num_words, BLOCK_W=_BLOCK_W, num_warps=NUM_WARPS
    )


def runs_of(host_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(place of the first, first id, length) of each run in which rising ids follow one another.

    [3, 4, 7, 8, 9]  ->  (0, 3, 2) (2, 7, 3)
    """
    runs: list[tuple[int, int, int]] = []
    for at, host_id in enumerate(host_ids):
        if runs and host_id == runs[-1][1] + runs[-1][2]:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((at, host_id, 1))
    return runs
