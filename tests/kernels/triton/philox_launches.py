"""Launches of the Philox functions that the kernels call, and the random words of the CPU."""

import numpy as np
import torch
import triton
import triton.language as tl

from kernels.torch import sampling as reference
from kernels.triton.sampling.philox import gumbel_noise, philox_4x32

_BLOCK = 256


def reference_random_words(counter_N4: torch.Tensor, key_N2: torch.Tensor) -> torch.Tensor:
    """The specification."""
    counter, key = (each.cpu().numpy().astype(np.uint64).T for each in (counter_N4, key_N2))
    words = reference.philox_4x32(tuple(counter), tuple(key))
    return torch.from_numpy(np.stack(words, axis=1).astype(np.int64))


def reference_noise(
    seeds_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Of every token, float32 [R, V] on the CPU."""
    ids_RV = torch.arange(vocab_size, device="cpu").expand(len(seeds_R), -1)
    return reference.gumbel_noise(seeds_R.cpu(), positions_R.cpu(), ids_RV)


@triton.jit
def _random_words_kernel(
    counter_ptr,  # int64 [N, 4]
    key_ptr,  # int64 [N, 2]
    out_ptr,  # int64 [N, 4]
    num_counters,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    valid = index < num_counters
    c0 = tl.load(counter_ptr + index * 4, valid, 0).to(tl.uint32)
    c1 = tl.load(counter_ptr + index * 4 + 1, valid, 0).to(tl.uint32)
    c2 = tl.load(counter_ptr + index * 4 + 2, valid, 0).to(tl.uint32)
    c3 = tl.load(counter_ptr + index * 4 + 3, valid, 0).to(tl.uint32)
    k0 = tl.load(key_ptr + index * 2, valid, 0).to(tl.uint32)
    k1 = tl.load(key_ptr + index * 2 + 1, valid, 0).to(tl.uint32)
    w0, w1, w2, w3 = philox_4x32(c0, c1, c2, c3, k0, k1)
    tl.store(out_ptr + index * 4, w0.to(tl.int64), valid)
    tl.store(out_ptr + index * 4 + 1, w1.to(tl.int64), valid)
    tl.store(out_ptr + index * 4 + 2, w2.to(tl.int64), valid)
    tl.store(out_ptr + index * 4 + 3, w3.to(tl.int64), valid)


@triton.jit
def _noise_kernel(
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    out_ptr,  # float32 [R, V]
    V,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    ids = first + tl.arange(0, TILE)  # [TILE]
    noise = gumbel_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), first, TILE)
    tl.store(out_ptr + row * V + ids, noise, ids < V)


def random_words(counter_N4: torch.Tensor, key_N2: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 of each counter under its key: int64 [N, 4] and [N, 2] in [0, 2**32)."""
    num_counters = counter_N4.shape[0]
    out_N4 = torch.empty_like(counter_N4)
    grid = (triton.cdiv(num_counters, _BLOCK),)
    if num_counters:
        _random_words_kernel[grid](counter_N4, key_N2, out_N4, num_counters, BLOCK=_BLOCK)
    return out_N4


def noise_of_rows(
    seeds_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`gumbel_noise` of every token on the tensors' device, float32 [R, V]."""
    rows = seeds_R.shape[0]
    out_RV = torch.empty(rows, vocab_size, dtype=torch.float32, device=seeds_R.device)
    grid = (triton.cdiv(vocab_size, 1024), rows)
    if rows:
        _noise_kernel[grid](seeds_R, positions_R, out_RV, vocab_size, TILE=1024)
    return out_RV
