"""Sums and shards among processes, by gloo: the same bits in whatever shape and place, and an error
when a rank is gone."""

import os
import signal
import time

import pytest
import torch

from engine_core.distributed.collectives import Collectives
from engine_core.distributed.parallel import Parallel
from tests.engine_core.distributed.rank_processes import RankProcesses

_WIDTH = 96


def _terms(rank: int, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers of very different size, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-8, 8, (2048, _WIDTH), generator=generator)
    return (torch.randn(2048, _WIDTH, generator=generator) * 2.0**exponents)[:num_rows].to(dtype)


def _sum(collectives: Collectives, num_rows: int, first: int, dtype: torch.dtype) -> torch.Tensor:
    """Of rows from `first` on."""
    x = _terms(collectives.parallel.tp_rank, first + num_rows, dtype)[first:].clone()
    summed = collectives.all_reduce_(x)
    assert summed is x
    return summed


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_to_the_bit_whatever_the_rows_and_the_place(
    ranks: RankProcesses, size: int, dtype: torch.dtype
) -> None:
    expected = _terms(0, 2048, dtype).float()
    for rank in range(1, size):
        expected += _terms(rank, 2048, dtype).float()
    expected = expected.to(dtype)
    for num_rows, first in ((1, 0), (1, 77), (3, 76), (63, 20), (2048, 0)):
        for summed in ranks.run(_sum, num_rows, first, dtype, tp_size=size):
            assert torch.equal(summed, expected[first : first + num_rows])


def _gather(collectives: Collectives) -> torch.Tensor:
    rank = collectives.parallel.tp_rank
    return collectives.all_gather(torch.tensor([[rank, 10 * rank]]).expand(3, 2))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_come_in_the_order_of_ranks(ranks: RankProcesses, size: int) -> None:
    expected = torch.tensor([[[rank, 10 * rank]] * 3 for rank in range(size)])
    for gathered in ranks.run(_gather, tp_size=size):
        assert torch.equal(gathered, expected)


def _pass_on(collectives: Collectives) -> torch.Tensor:
    """Each stage adds its number plus one; the ranks of a stage are a power of ten apart."""
    mine, x = collectives.parallel, torch.zeros(4, 5)
    if mine.pp_rank:
        collectives.recv(x, mine.pp_rank - 1)
    x += (mine.pp_rank + 1) * 10**mine.tp_rank
    if mine.pp_rank + 1 < mine.pp_size:
        collectives.send(x, mine.pp_rank + 1)
    return collectives.all_reduce_(x)


@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 2), (1, 4), (2, 2)])
def test_hidden_states_pass_from_stage_to_stage(
    ranks: RankProcesses, tp_size: int, pp_size: int
) -> None:
    answers = ranks.run(_pass_on, tp_size=tp_size, pp_size=pp_size)
    numbers = range(tp_size * pp_size)
    places = [Parallel.of(rank, tp_size=tp_size, pp_size=pp_size) for rank in numbers]
    assert [place.rank for place in places] == [*numbers]
    stage_sum = sum(range(1, pp_size + 1))
    assert answers[-1].unique().tolist() == [stage_sum * (11 if tp_size == 2 else 1)]


def _sum_for_ever(collectives: Collectives) -> None:
    while True:
        collectives.all_reduce_(torch.ones(8))


@pytest.mark.slow
def test_the_death_of_a_rank_is_an_error_of_the_others_at_once() -> None:
    """Long before the time-out of 300 s."""
    with RankProcesses(3) as processes:
        processes.run(_gather, tp_size=3)
        processes.start(_sum_for_ever, tp_size=3)
        os.kill(processes.processes[1].pid, signal.SIGKILL)
        killed_s = time.monotonic()
        for rank in (0, 2):
            is_error, text = processes.answer(rank)
            assert is_error
            assert f"CollectiveError: rank {rank} of 3 lost another one: " in text
        assert time.monotonic() - killed_s < 100


@pytest.mark.slow
def test_a_rank_that_is_silent_is_an_error_after_the_time_out() -> None:
    with RankProcesses(2, timeout_s=10.0) as processes:
        processes.run(_gather, tp_size=2)
        os.kill(processes.processes[1].pid, signal.SIGSTOP)
        try:
            processes.start(_gather, tp_size=2)
            is_error, text = processes.answer(0)
        finally:
            os.kill(processes.processes[1].pid, signal.SIGCONT)
        assert is_error
        assert "CollectiveError: rank 0 of 2 lost another one: " in text


def test_a_rank_outside_its_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tp_rank is 2, it must be in \[0, 2\)"):
        Parallel(tp_rank=2, tp_size=2)
