"""`copy_blocks` against a plain loop."""

import pytest
import torch

from kernels.torch.operations import TorchOperations

OPS = TorchOperations()


def random_cache(num_blocks, dtype):
    return tuple(torch.randn(num_blocks, 3, 2, 5).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [0, 1, 7])
def test_copying_to_another_cache_equals_a_loop(number, dtype):
    src, dst = random_cache(9, dtype), random_cache(11, dtype)
    src_ids = torch.randint(9, (number,))
    dst_ids = torch.randperm(11)[:number]
    expected = [tensor.clone() for tensor in dst]
    for source, destination in zip(src_ids.tolist(), dst_ids.tolist(), strict=True):
        for part in range(2):
            expected[part][destination] = src[part][source]
    OPS.copy_blocks(src, dst, src_ids, dst_ids)
    assert all(map(torch.equal, dst, expected))


def test_within_one_cache_everything_is_read_before_anything_is_written():
    cache = random_cache(4, torch.float32)
    before = [tensor.clone() for tensor in cache]
    OPS.copy_blocks(cache, cache, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    for old, new in zip(before, cache, strict=True):
        assert torch.equal(new, old[[2, 0, 1, 3]])


def test_host_blocks_have_the_shape_of_device_blocks_and_take_copies():
    cache = random_cache(5, torch.float32)
    host = OPS.allocate_host_kv_cache(cache, 2)
    assert [tensor.shape for tensor in host] == [(2, 3, 2, 5)] * 2
    OPS.copy_blocks(cache, host, torch.tensor([4, 1]), torch.tensor([0, 1]))
    for kept, tensor in zip(host, cache, strict=True):
        assert torch.equal(kept, tensor[[4, 1]])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_travel_between_pinned_host_memory_and_a_gpu():
    host = tuple(tensor.pin_memory() for tensor in random_cache(6, torch.bfloat16))
    device = tuple(tensor.cuda() for tensor in random_cache(8, torch.bfloat16))
    back = tuple(torch.zeros_like(tensor).pin_memory() for tensor in host)
    OPS.copy_blocks(host, device, torch.tensor([5, 0, 3]), torch.tensor([7, 1, 2]))
    OPS.copy_blocks(device, back, torch.tensor([7, 1, 2]), torch.tensor([0, 1, 2]))
    for sent, returned in zip(host, back, strict=True):
        assert torch.equal(returned[:3], sent[[5, 0, 3]])
