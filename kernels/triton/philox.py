"""Philox4x32-10 and Gumbel noise as functions that other kernels call.

J. Salmon, M. Moraes, R. Dror, D. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.torch import sampling as reference
from kernels.triton.tensor_checks import check_tensor

_MULTIPLIER_0 = tl.constexpr(reference.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(reference.MULTIPLIERS[1])
_INCREMENT_0 = tl.constexpr(reference.KEY_INCREMENTS[0])
_INCREMENT_1 = tl.constexpr(reference.KEY_INCREMENTS[1])
_NUM_ROUNDS = tl.constexpr(reference.NUM_ROUNDS)
_STREAM = tl.constexpr(reference.STREAM)
_UNIT = tl.constexpr(2.0**-23)
_BLOCK = 256


def random_words_reference(counter_N4: torch.Tensor, key_N2: torch.Tensor) -> torch.Tensor:
    """The specification."""
    c0, c1, c2, c3 = counter_N4.unbind(1)
    k0, k1 = key_N2.unbind(1)
    return torch.stack(reference.philox_4x32((c0, c1, c2, c3), (k0, k1)), dim=1)


@triton.jit
def philox_4x32(c0, c1, c2, c3, k0, k1):
    """Four uint32 tiles of random words; counters and keys are uint32 and broadcast together."""
    for _ in tl.static_range(_NUM_ROUNDS):
        high_0 = tl.umulhi(c0, tl.full(c0.shape, _MULTIPLIER_0, tl.uint32))
        high_1 = tl.umulhi(c2, tl.full(c2.shape, _MULTIPLIER_1, tl.uint32))
        low_0 = c0 * tl.full(c0.shape, _MULTIPLIER_0, tl.uint32)
        low_1 = c2 * tl.full(c2.shape, _MULTIPLIER_1, tl.uint32)
        c0 = high_1 ^ c1 ^ k0
        c2 = high_0 ^ c3 ^ k1
        c1 = low_1
        c3 = low_0
        k0 = k0 + tl.full(k0.shape, _INCREMENT_0, tl.uint32)
        k1 = k1 + tl.full(k1.shape, _INCREMENT_1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel_noise(seed, position, first_token, TILE: tl.constexpr):
    """Standard Gumbel noise of tokens [first_token, first_token + TILE), float32 [TILE].

    `kernels.torch.sampling.gumbel_noise` on the device: token t has word t % 4 of Philox at
    counter (t // 4, position, stream). Equal to it but for the last bit of two logarithms.

    seed, position: int64 scalars. first_token, TILE: multiples of 4.
    """
    zeros = tl.zeros([TILE // 4], tl.uint32)
    quads = (first_token // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)  # [TILE / 4]
    w0, w1, w2, w3 = philox_4x32(
        quads,
        zeros + position.to(tl.uint32),
        zeros + (position >> 32).to(tl.uint32),
        zeros + _STREAM,
        zeros + seed.to(tl.uint32),
        zeros + (seed >> 32).to(tl.uint32),
    )
    # w0[0] w1[0] w2[0] w3[0] w0[1] ...: the order of the tokens
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))  # [TILE]
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * _UNIT  # exact: 24 bits
    return -tl.log(-tl.log(uniform))


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
    """Philox4x32-10 of each counter under its key.

    Args:
        counter_N4: int64 [N, 4] contiguous, values in [0, 2**32).
        key_N2: int64 [N, 2] contiguous, likewise.

    Returns:
        int64 [N, 4], values in [0, 2**32).
    """
    num_counters = counter_N4.shape[0]
    check_tensor("counter", counter_N4, (num_counters, 4), torch.int64, counter_N4.device)
    check_tensor("key", key_N2, (num_counters, 2), torch.int64, counter_N4.device)
    out_N4 = torch.empty_like(counter_N4)
    grid = (triton.cdiv(num_counters, _BLOCK),)
    if num_counters:
        _random_words_kernel[grid](counter_N4, key_N2, out_N4, num_counters, BLOCK=_BLOCK)
    return out_N4


def gumbel_noise_of_vocabulary(
    seeds_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`kernels.torch.sampling.gumbel_noise_of_vocabulary` on the device, float32 [R, V].

    For checks of a device's logarithms; sampling makes the noise where it uses it.
    """
    rows = seeds_R.shape[0]
    check_tensor("seeds", seeds_R, (rows,), torch.int64, seeds_R.device)
    check_tensor("positions", positions_R, (rows,), torch.int64, seeds_R.device)
    out_RV = torch.empty(rows, vocab_size, dtype=torch.float32, device=seeds_R.device)
    grid = (triton.cdiv(vocab_size, 1024), rows)
    if rows:
        _noise_kernel[grid](seeds_R, positions_R, out_RV, vocab_size, TILE=1024)
    return out_RV
