"""Blocks of the KV cache copied on the device, and swapped with host memory. All exact."""

import torch

from kernels.triton.kv_cache import copy_blocks_reference, copy_within, swap_blocks
from tests.gpu.checks.errors import num_different

NUM_BLOCKS = 512
BLOCK = (2, 8, 16, 128)
"""[2, K, S, D] of Llama-3.1-8B"""


def make_caches(num_layers: int, block: tuple[int, ...], device: str) -> list[torch.Tensor]:
    return [
        torch.randn(NUM_BLOCKS, *block, dtype=torch.bfloat16, device=device)
        for _ in range(num_layers)
    ]


def check_copies(
    num_pairs: int, *, overlapping: bool, block: tuple[int, ...] = BLOCK, device: str
) -> float:
    """Two layers; `overlapping`: destinations are other pairs' sources."""
    caches = make_caches(2, block, device)
    ids = torch.randperm(NUM_BLOCKS)
    src_ids, dst_ids = ids[:num_pairs], ids[num_pairs : 2 * num_pairs]
    if overlapping:
        dst_ids = src_ids.roll(1)
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        copy_blocks_reference(cache, src_ids.to(device), dst_ids.to(device))
    for cache in caches:
        copy_within(cache, src_ids, dst_ids)
    return sum(num_different(*pair) for pair in zip(caches, expected, strict=True))


def check_swaps(num_pairs: int, *, block: tuple[int, ...] = BLOCK, device: str) -> float:
    """Out to the host and back in to other blocks."""
    caches = make_caches(2, block, device)
    hosts = [torch.zeros(cache.shape, dtype=cache.dtype) for cache in caches]
    if device == "cuda":
        hosts = [host.pin_memory() for host in hosts]
    before = [cache.clone() for cache in caches]
    out_ids, host_ids = torch.randperm(NUM_BLOCKS)[:num_pairs], torch.arange(num_pairs)
    in_ids = torch.randperm(NUM_BLOCKS)[:num_pairs]
    for cache, host in zip(caches, hosts, strict=True):
        swap_blocks(cache, host, out_ids, host_ids)
        swap_blocks(host, cache, host_ids, in_ids)
    different = 0.0
    for cache, old in zip(caches, before, strict=True):
        expected = old.clone()
        expected[in_ids.to(device)] = old[out_ids.to(device)]
        different += num_different(cache, expected)
    return different
