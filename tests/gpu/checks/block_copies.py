"""Blocks of the KV cache copied on the device, and swapped with host memory. All exact."""

import torch

from kernels.triton.block_copies import TritonBlockCopier
from tests.gpu.checks.errors import num_different

NUM_BLOCKS = 512
BLOCK = (2, 8, 16, 128)
"""[2, K, S, D] of Llama-3.1-8B"""


def make_copier(
    num_layers: int, block: tuple[int, ...], num_host_blocks: int, device: str
) -> tuple[TritonBlockCopier, list[torch.Tensor]]:
    """The copier of some layers' caches of random numbers."""
    caches = [
        torch.randn(NUM_BLOCKS, *block, dtype=torch.bfloat16, device=device)
        for _ in range(num_layers)
    ]
    pairs = [(cache[:, 0], cache[:, 1]) for cache in caches]
    return TritonBlockCopier(pairs, num_host_blocks), caches


def check_copies(
    num_pairs: int, *, overlapping: bool, block: tuple[int, ...] = BLOCK, device: str
) -> float:
    """Two layers; `overlapping`: destinations are other pairs' sources."""
    copier, caches = make_copier(2, block, 0, device)
    ids = torch.randperm(NUM_BLOCKS)
    src_ids, dst_ids = ids[:num_pairs], ids[num_pairs : 2 * num_pairs]
    if overlapping:
        dst_ids = src_ids.roll(1)
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        cache[dst_ids.to(device)] = cache[src_ids.to(device)]
    copier.copy(src_ids, dst_ids)
    return sum(num_different(*pair) for pair in zip(caches, expected, strict=True))


def check_swaps(num_pairs: int, *, block: tuple[int, ...] = BLOCK, device: str) -> float:
    """Out to the host, overwritten at once, and back in to other blocks: of 32 layers, so that
    staging memory holds a few of them at a time."""
    copier, caches = make_copier(32, block, num_pairs, device)
    before = [cache.clone() for cache in caches]
    out_ids, host_ids = torch.randperm(NUM_BLOCKS)[:num_pairs], torch.randperm(num_pairs)
    in_ids = torch.randperm(NUM_BLOCKS)[:num_pairs]
    copier.swap_out(out_ids, host_ids)
    for cache in caches:
        cache[out_ids.to(device)] = 0
    copier.swap_in(host_ids, in_ids)
    different = 0.0
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[out_ids.to(device)] = 0
        expected[in_ids.to(device)] = old[out_ids.to(device)]
        different += num_different(cache, expected)
    return different
