"""Ranks are processes that share memory; each interprets the kernel, and waits for the others."""

import multiprocessing
import random
import traceback

import pytest
import torch

from kernels.triton.one_shot_sums import MAX_RANKS, OneShotSums, buffer_bytes

MOST_BYTES = 64 * 48
CPU = torch.device("cpu")


def terms(call: int, world: int) -> torch.Tensor:
    """Of every rank: [world, N]. Sizes from one element to all that fits, so that programs of a
    launch have run unequally often; magnitudes whose sum depends on the order."""
    draws = random.Random(call)
    dtype = draws.choice([torch.bfloat16, torch.float16, torch.float32])
    most = MOST_BYTES // dtype.itemsize
    num = draws.choice([1, 2, 63, 64, 65, most // 2 + 1, most - 1, most])
    scale = 10.0 ** torch.randint(
        -3, 4, (world, num), generator=torch.Generator().manual_seed(call)
    )
    return (torch.randn(world, num, generator=torch.Generator().manual_seed(-call)) * scale).to(
        dtype
    )


def sum_by_rising_rank(terms_WN: torch.Tensor) -> torch.Tensor:
    total_N = terms_WN[0].float()
    for term_N in terms_WN[1:]:
        total_N = total_N + term_N.float()
    return total_N.to(terms_WN.dtype)


def run_rank(rank, buffers, num_calls, pipe):
    try:
        bases = [buffer.data_ptr() for buffer in buffers]
        sums = OneShotSums(bases, rank, most_bytes=MOST_BYTES, device=CPU)
        wrong = []
        for call in range(1, num_calls + 1):
            terms_WN = terms(call, len(buffers))
            x_N = terms_WN[rank].clone()
            sums(x_N)
            wanted_N = sum_by_rising_rank(terms_WN)
            if x_N.dtype == torch.bfloat16:  # which the interpreter rounds towards zero
                is_right = torch.allclose(x_N, wanted_N, rtol=2**-7, atol=0)
            else:
                is_right = torch.equal(x_N, wanted_N)
            if not is_right:
                wrong.append(call)
        pipe.send(wrong)
    except Exception:
        pipe.send(traceback.format_exc())


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, pytest.param(2, marks=pytest.mark.extended)])
def test_every_rank_has_the_same_sum_in_the_order_of_ranks(world):
    fork = multiprocessing.get_context("fork")
    buffers = [
        torch.zeros(buffer_bytes(MOST_BYTES), dtype=torch.uint8).share_memory_()
        for _ in range(world)
    ]
    pipes, processes = [], []
    for rank in range(world):
        mine, theirs = fork.Pipe()
        process = fork.Process(target=run_rank, args=(rank, buffers, 12, theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    try:
        for pipe in pipes:
            assert pipe.poll(120), "a rank waits for ever"
            assert pipe.recv() == []
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_what_does_not_fit_is_refused():
    sums = OneShotSums([0], 0, most_bytes=64, device=CPU)
    with pytest.raises(ValueError, match="132 bytes, one shot 64"):
        sums(torch.zeros(33))
    with pytest.raises(ValueError, match="x is int32"):
        sums(torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="9 ranks"):
        OneShotSums([0] * (MAX_RANKS + 1), 0, most_bytes=64, device=CPU)
