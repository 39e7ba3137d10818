"""Blocks of the KV cache copied on the device, and swapped with host memory. All exact."""

import math

import torch

from kernels.triton.block_copies import TritonBlockCopier
from tests.gpu.checks.errors import num_different

NUM_BLOCKS = 512
BLOCK = (2, 8, 16, 128)
"""[2, K, S, D] of Llama-3.1-8B"""


def make_copier(
    num_layers: int, block: tuple[int, ...], num_host_blocks: int, device: str
) -> tuple[TritonBlockCopier, torch.Tensor]:
    """The copier of blocks of random bytes, of so many layers in bfloat16, and the blocks."""
    num_bytes = num_layers * math.prod(block) * 2
    blocks = torch.randint(256, (NUM_BLOCKS, num_bytes), dtype=torch.uint8, device=device)
    return TritonBlockCopier(blocks, num_host_blocks), blocks


def check_copies(
    num_pairs: int, *, overlapping: bool, block: tuple[int, ...] = BLOCK, device: str
) -> float:
    """Two layers; `overlapping`: destinations are other pairs' sources."""
    copier, blocks = make_copier(2, block, 0, device)
    ids = torch.randperm(NUM_BLOCKS)
    src_ids, dst_ids = ids[:num_pairs], ids[num_pairs : 2 * num_pairs]
    if overlapping:
        dst_ids = src_ids.roll(1)
    expected = blocks.clone()
    expected[dst_ids.to(device)] = blocks[src_ids.to(device)]
    copier.copy(src_ids, dst_ids)
    return num_different(blocks, expected)


def check_swaps(num_pairs: int, *, block: tuple[int, ...] = BLOCK, device: str) -> float:
    """Out to the host, overwritten at once, and back in to other blocks: of 32 layers, so that
    staging memory holds a few of them at a time."""
    copier, blocks = make_copier(32, block, num_pairs, device)
    before = blocks.clone()
    out_ids, host_ids = torch.randperm(NUM_BLOCKS)[:num_pairs], torch.randperm(num_pairs)
    in_ids = torch.randperm(NUM_BLOCKS)[:num_pairs]
    copier.swap_out(out_ids, host_ids)
    blocks[out_ids.to(device)] = 0
    copier.swap_in(host_ids, in_ids)
    expected = before.clone()
    expected[out_ids.to(device)] = 0
    expected[in_ids.to(device)] = before[out_ids.to(device)]
    return num_different(blocks, expected)
