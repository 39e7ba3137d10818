"""Sums over ranks that can read each other's memory (NVLink), in one launch and without a library.

x[n] = ((x_0[n] + x_1[n]) + x_2[n]) + ... by rising rank in float32: an element's bits follow from
the terms alone. After TensorRT-LLM's one-shot all-reduce; prepared, not run on a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.tensor_checks import FLOATS, check_tensor

ONE_SHOT_BYTES = 0
"""Sums of up to so many bytes go this way; 0: none, until a run on GPUs has decided. 262,144 is
where two phases begin to pay."""

MAX_RANKS = 8
_PROGRAMS = 64
"""All of them run at once on any GPU of NVLink: each waits for its like at other ranks."""
_FLAG_BYTES = 4 * MAX_RANKS * _PROGRAMS


def buffer_bytes(most_bytes: int) -> int:
    """Of the memory that each rank shares, for sums of up to so many bytes."""
    return _FLAG_BYTES + 2 * _part_bytes(most_bytes) * _PROGRAMS


def _part_bytes(most_bytes: int) -> int:
    return 1 << (max(-(-most_bytes // _PROGRAMS), 16) - 1).bit_length()


@triton.jit
def one_shot_sum_kernel(
    x_N,  # this rank's terms; -> the sums
    bases_W,  # int64: where each rank's buffer lies in this process
    rounds_P,  # int32: how often this rank's program p has run; +1
    num,  # N
    rank,
    WORLD: tl.constexpr,  # ranks
    WORLD_POWER: tl.constexpr,  # not below WORLD
    MAX_RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FLAG_BYTES: tl.constexpr,
    PART: tl.constexpr,  # elements of a program
):
    # A buffer: flags [PROGRAMS, MAX_RANKS] int32, the round that a rank's program has written for;
    # then terms [2, PROGRAMS, PART]. Rounds use the halves in turn: a program that has seen all
    # flags of round n knows that every rank has left round n - 1, and so may write its half again
    # in round n + 1. All is counted on the device, so a graph may be replayed.
    program = tl.program_id(0)
    place = program * PART + tl.arange(0, PART)
    mask = place < num
    turn = tl.load(rounds_P + program) + 1
    start = ((turn & 1) * PROGRAMS + program) * PART + tl.arange(0, PART)
    pointer = tl.pointer_type(x_N.dtype.element_ty)
    own = tl.load(bases_W + rank)
    to = tl.multiple_of((own + FLAG_BYTES).to(pointer), 16) + start
    tl.store(to, tl.load(x_N + place, mask=mask), mask=mask)
    tl.debug_barrier()  # all threads have written before one of them says so

    ranks = tl.arange(0, WORLD_POWER)
    there = ranks < WORLD
    bases = tl.load(bases_W + ranks, mask=there, other=0)
    turns = tl.zeros([WORLD_POWER], tl.int32) + turn
    flag = program * MAX_RANKS
    theirs = bases.to(tl.pointer_type(tl.int32)) + (flag + rank)
    tl.atomic_xchg(theirs, turns, mask=there, sem="release", scope="sys")
    ours = own.to(tl.pointer_type(tl.int32)) + (flag + ranks)
    num_behind = WORLD
    while num_behind > 0:
        seen = tl.atomic_add(ours, turns * 0, mask=there, sem="acquire", scope="sys")
        # a difference, as rounds go round at 2^31
        num_behind = tl.sum((there & (seen - turns < 0)).to(tl.int32))
    tl.debug_barrier()

    first = tl.multiple_of((tl.load(bases_W) + FLAG_BYTES).to(pointer), 16) + start
    total = tl.load(first, mask=mask, cache_modifier=".cg").to(tl.float32)
    for other in tl.static_range(1, WORLD):
        term = tl.multiple_of((tl.load(bases_W + other) + FLAG_BYTES).to(pointer), 16) + start
        total += tl.load(term, mask=mask, cache_modifier=".cg").to(tl.float32)
    tl.store(x_N + place, total.to(x_N.dtype.element_ty), mask=mask)
    tl.store(rounds_P + program, turn)


def sum_constants(world: int, most_bytes: int, itemsize: int) -> dict[str, Any]:
    """Constants of the kernel's launch, for sums of up to `most_bytes` over `world` ranks."""
    part = _part_bytes(most_bytes) // itemsize
    return {
        "WORLD": world,
        "WORLD_POWER": triton.next_power_of_2(world),
        "MAX_RANKS": MAX_RANKS,
        "PROGRAMS": _PROGRAMS,
        "FLAG_BYTES": _FLAG_BYTES,
        "PART": part,
        "num_warps": max(1, min(8, part // 256)),
    }


class OneShotSums:
    """Sums over ranks, each with a buffer that all of them reach. Every rank makes the same calls
    in the same order. A rank that is gone leaves the others waiting on their devices: who notices
    ends their processes.

    Args:
        bases: address of each rank's buffer of `buffer_bytes(most_bytes)`, by rank, in this
            process. All of it zero, for every rank, before the first call of any.
        rank: this one.
        most_bytes: of x.
        device: of x.

    Raises:
        ValueError: more ranks than 8.
    """

    def __init__(
        self, bases: list[int], rank: int, *, most_bytes: int, device: torch.device
    ) -> None:
        if len(bases) > MAX_RANKS:
            raise ValueError(f"{len(bases)} ranks, and one shot is for up to {MAX_RANKS}")
        self.most_bytes = most_bytes
        self._rank = rank
        self._bases_W = torch.tensor(bases, dtype=torch.int64, device=device)
        self._rounds_P = torch.zeros(_PROGRAMS, dtype=torch.int32, device=device)
        self._launches = BoundLaunches(one_shot_sum_kernel)

    def __call__(self, x_N: torch.Tensor) -> None:
        """In place, the sum over ranks -> x_N. Contiguous, of at most `most_bytes`."""

        def prepare() -> Launch:
            check_tensor("x", x_N, (x_N.numel(),), FLOATS, self._bases_W.device)
            if x_N.nbytes > self.most_bytes:
                raise ValueError(f"x has {x_N.nbytes} bytes, one shot {self.most_bytes} at most")
            constants = sum_constants(len(self._bases_W), self.most_bytes, x_N.itemsize)
            programs = triton.cdiv(len(x_N), constants["PART"])
            return Launch((programs,), (len(x_N), self._rank), constants)

        self._launches((x_N, self._bases_W, self._rounds_P), self._rank, prepare)
