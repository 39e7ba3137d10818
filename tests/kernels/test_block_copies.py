"""Copies of blocks against a plain loop: torch's, and Triton's interpreted."""

import pytest
import torch

from kernels.torch.operations import TorchOperations
from kernels.triton.operations import TritonOperations

NUM_BLOCKS, NUM_HOST_BLOCKS = 9, 5
BACKENDS = {"torch": TorchOperations(), "triton": TritonOperations(torch.device("cpu"))}


@pytest.fixture(params=BACKENDS)
def ops(request):
    return BACKENDS[request.param]


def make_copier(ops, num_host_blocks=NUM_HOST_BLOCKS):
    """Every block differs. Copier, the device's blocks, the host's."""
    blocks = ops.allocate_blocks(NUM_BLOCKS, 64 * 35)
    copier = ops.make_block_copier(blocks, num_host_blocks)
    for each in (blocks, copier.host_blocks):
        each.random_(256, generator=torch.Generator().manual_seed(len(each)))
    return copier, blocks, copier.host_blocks


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def test_blocks_go_where_they_are_sent_and_others_stay(ops):
    copier, device, host = make_copier(ops)
    d, h = device.clone(), host.clone()
    copier.swap_out(ids(5, 1, 8), ids(3, 0, 4))
    copier.swap_in(ids(4, 1, 2), ids(0, 5, 6))
    copier.copy(ids(0, 0, 3), ids(2, 7, 8))
    h[[3, 0, 4]] = d[[5, 1, 8]]
    d[[0, 5, 6]] = h[[4, 1, 2]]
    d[[2, 7, 8]] = d[[0, 0, 3]]
    assert torch.equal(device, d) and torch.equal(host, h)


@pytest.mark.parametrize(
    ("src", "dst"), [((0, 1, 2), (1, 2, 0)), ((1, 2), (2, 1)), ((4,), (4,)), ((), ())]
)
def test_all_is_read_before_any_is_written(ops, src, dst):
    copier, device, _ = make_copier(ops)
    before = device.clone()
    copier.copy(ids(*src), ids(*dst))
    assert torch.equal(device[list(dst)], before[list(src)])


def test_without_host_blocks_there_is_no_second_tier(ops):
    copier, _, host = make_copier(ops, num_host_blocks=0)
    assert not len(host)
    with pytest.raises(ValueError):
        copier.swap_out(ids(1), ids(0))


@pytest.mark.parametrize(
    ("method", "src", "dst", "words"),
    [
        ("copy", ids(0, 0), ids(1, 9), r"destination ids span 1\.\.9, there are blocks 0\.\.8"),
        ("swap_out", ids(0), ids(5), r"destination ids span 5\.\.5, there are blocks 0\.\.4"),
        ("swap_in", ids(-1), ids(1), r"source ids span -1"),
        ("copy", ids(0, 1), ids(2, 2), "twice among destinations"),
        ("swap_in", ids(0, 1), ids(2), "2 sources, 1 destinations"),
        ("copy", ids(0).int(), ids(2), r"torch\.int32 .* make them int64"),
    ],
)
def test_ids_that_cannot_be_are_refused_by_name(ops, method, src, dst, words):
    copier, device, host = make_copier(ops)
    before = device.clone(), host.clone()
    with pytest.raises(ValueError, match=words):
        getattr(copier, method)(src, dst)
    assert all(map(torch.equal, before, (device, host)))
