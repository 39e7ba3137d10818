"""Copies of KV blocks: within the device, and to and from host memory through staging memory.

    compute stream   gather ----+          step ...          +---- scatter   step ...
                                v staging                    | staging
    copy stream                 +---- copies to the host ... copies from the host

A block's pieces of all layers lie side by side in staging and host memory, so that blocks whose
host ids follow one another travel as one piece."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from kernels.interface.block_copies import check_ids
from kernels.interface.operations import KVCache
from kernels.triton.attention.kv_cache import whole_cache
from kernels.triton.host_memory import pinned_memory

STAGING_BYTES = 32 * 1024**2
"""Of one of the two parts: while one travels, the other is filled or emptied."""
_BLOCK_W = 2048
"""Words of 8 bytes a program."""
NUM_WARPS = 8
_COPY, _PACK, _UNPACK = 0, 1, 2
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
    caches_ptr,  # int64 [C, 3]: address, words of a block, its first word in a packed one
    src_ids_ptr,  # int64 [N]
    dst_ids_ptr,  # int64 [N], read if DIRECTION is 0
    packed_ptr,  # int64 [>= N, P], used by the others
    P: tl.constexpr,
    DIRECTION: tl.constexpr,  # 0: blocks to blocks, none of dst in src; 1: to packed; 2: from it
    BLOCK_W: tl.constexpr,
):
    """Program (pair, cache, part of a block)."""
    pair = tl.program_id(0).to(tl.int64)
    entry = caches_ptr + tl.program_id(1) * 3
    cache_ptr = tl.load(entry).to(tl.pointer_type(tl.int64))
    num_words = tl.load(entry + 1)
    word_W = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside_W = word_W < num_words
    block_ptr = cache_ptr + tl.load(src_ids_ptr + pair) * num_words + word_W
    piece_ptr = packed_ptr + pair * P + tl.load(entry + 2) + word_W
    if DIRECTION == 0:
        other_ptr = cache_ptr + tl.load(dst_ids_ptr + pair) * num_words + word_W
        tl.store(other_ptr, tl.load(block_ptr, mask=inside_W), mask=inside_W)
    elif DIRECTION == 1:
        tl.store(piece_ptr, tl.load(block_ptr, mask=inside_W), mask=inside_W)
    else:
        tl.store(block_ptr, tl.load(piece_ptr, mask=inside_W), mask=inside_W)


class _Part:
    """Of the staging memory. `free`: done when nothing reads or writes it."""

    def __init__(self, num_blocks: int, num_words: int, device: torch.device) -> None:
        self.packed_NP = torch.empty(num_blocks, num_words, dtype=torch.int64, device=device)
        self.free: Any = None


class TritonBlockCopier:
    """See `kernels.interface.block_copies.BlockCopier`. Not for the inside of a CUDA graph.

    Args:
        caches: by layer, of `allocate_kv_cache`; their sizes may differ.
        num_host_blocks: of the second tier; 0: none, and no staging memory.
        staging_bytes: of each of its two parts.
    """

    def __init__(
        self,
        caches: Sequence[KVCache],
        num_host_blocks: int,
        *,
        lanes: Lanes | None = None,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._words = [_as_words(whole_cache(cache)) for cache in caches]
        device = self._words[0].device
        self._num_blocks, self._num_host_blocks = len(self._words[0]), num_host_blocks
        widths = [words_BW.shape[1] for words_BW in self._words]
        *starts, self._num_words = itertools.accumulate(widths, initial=0)
        self._widest = max(widths)
        table = [
            (words_BW.data_ptr(), width, start)
            for words_BW, width, start in zip(self._words, widths, starts, strict=True)
        ]
        self._table_C3 = torch.tensor(table, dtype=torch.int64, device=device)
        is_gpu = device.type == "cuda"
        self._lanes = lanes or (CudaLanes(device) if is_gpu else InOrder())
        host = pinned_memory(num_host_blocks * self._num_words * 8, device)
        self._host_HP = host.view(torch.int64).view(num_host_blocks, self._num_words)
        self.host_caches: list[KVCache] = []
        self._parts: list[_Part] = []
        if num_host_blocks:
            self.host_caches = [
                _views(self._host_HP[:, start : start + width], cache)
                for start, width, cache in zip(starts, widths, caches, strict=True)
            ]
            size = max(1, staging_bytes // (8 * self._num_words))
            self._parts = [_Part(size, self._num_words, device) for _ in range(2)]

    def copy(self, src_ids_N: torch.Tensor, dst_ids_N: torch.Tensor) -> None:
        """One launch for all layers. A destination may be another pair's source; those (rare) calls
        go through a second buffer, layer by layer."""
        check_ids(src_ids_N, dst_ids_N, self._num_blocks, self._num_blocks)
        if not src_ids_N.numel():
            return
        src_ids, dst_ids = self._send(src_ids_N), self._send(dst_ids_N)
        if torch.isin(dst_ids_N, src_ids_N).any():
            for words_BW in self._words:
                words_BW.index_copy_(0, dst_ids, words_BW.index_select(0, src_ids))
        else:
            self._move(src_ids, dst_ids, self._table_C3, _COPY)

    def swap_in(self, host_ids_N: torch.Tensor, block_ids_N: torch.Tensor) -> None:
        """The transfer may begin while an earlier step runs."""
        check_ids(host_ids_N, block_ids_N, self._num_host_blocks, self._num_blocks)
        for part, block_ids, runs in self._chunks(block_ids_N, host_ids_N):
            arrived = self._lanes.travel(self._travel_of(part, runs, to_host=False), part.free)
            part.free = self._lanes.compute(self._packing_of(part, block_ids, _UNPACK), arrived)

    def swap_out(self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor) -> None:
        """The transfer ends in the background; later ones wait for it."""
        check_ids(block_ids_N, host_ids_N, self._num_blocks, self._num_host_blocks)
        for part, block_ids, runs in self._chunks(block_ids_N, host_ids_N):
            gathered = self._lanes.compute(self._packing_of(part, block_ids, _PACK), part.free)
            part.free = self._lanes.travel(self._travel_of(part, runs, to_host=True), gathered)

    def _chunks(
        self, block_ids_N: torch.Tensor, host_ids_N: torch.Tensor
    ) -> Iterator[tuple[_Part, torch.Tensor, list[tuple[int, int, int]]]]:
        """(part, device blocks, runs) of as many pairs as a part holds, by rising host ids."""
        host_ids, order = host_ids_N.sort()
        block_ids = block_ids_N[order]
        if not len(host_ids):
            return
        size = len(self._parts[0].packed_NP)
        for chunk, ids in zip(block_ids.split(size), host_ids.split(size), strict=True):
            part = self._parts[0]
            self._parts.reverse()
            yield part, self._send(chunk), runs_of(ids.tolist())

    def _packing_of(self, part: _Part, block_ids: torch.Tensor, direction: int) -> Work:
        return lambda: self._move(block_ids, block_ids, part.packed_NP, direction)

    def _travel_of(self, part: _Part, runs: list[tuple[int, int, int]], *, to_host: bool) -> Work:
        def travel() -> None:
            for at, host_id, length in runs:
                here = part.packed_NP[at : at + length]
                there = self._host_HP[host_id : host_id + length]
                src, dst = (here, there) if to_host else (there, here)
                dst.copy_(src, non_blocking=True)

        return travel

    def _move(
        self, src_ids: torch.Tensor, dst_ids: torch.Tensor, packed_NP: torch.Tensor, direction: int
    ) -> None:
        grid = (len(src_ids), len(self._words), triton.cdiv(self._widest, _BLOCK_W))
        move_blocks_kernel[grid](
            self._table_C3,
            src_ids,
            dst_ids,
            packed_NP,
            P=self._num_words,
            DIRECTION=direction,
            BLOCK_W=_BLOCK_W,
            num_warps=NUM_WARPS,
        )

    def _send(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.to(self._words[0].device, non_blocking=True)


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


def _as_words(kv_cache_B2KSD: torch.Tensor) -> torch.Tensor:
    """The cache as int64 [B, W], the same memory: bytes have no dtype."""
    return kv_cache_B2KSD.view(kv_cache_B2KSD.shape[0], -1).view(torch.int64)


def _views(words_HW: torch.Tensor, like: KVCache) -> KVCache:
    """Keys and values of one layer's part of the host's blocks."""
    keys_BKSD = like[0]
    shape = (len(words_HW), 2, *keys_BKSD.shape[1:])
    kv_H2KSD = words_HW.view(keys_BKSD.dtype).unflatten(1, shape[1:])
    return kv_H2KSD[:, 0], kv_H2KSD[:, 1]
