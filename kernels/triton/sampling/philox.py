"""Philox4x32-10 and Gumbel noise as functions that other kernels call.

J. Salmon, M. Moraes, R. Dror, D. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011)."""

import triton
import triton.language as tl

from kernels.torch import sampling as reference

_MULTIPLIER_0 = tl.constexpr(reference.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(reference.MULTIPLIERS[1])
_INCREMENT_0 = tl.constexpr(reference.KEY_INCREMENTS[0])
_INCREMENT_1 = tl.constexpr(reference.KEY_INCREMENTS[1])
_NUM_ROUNDS = tl.constexpr(reference.NUM_ROUNDS)
_STREAM = tl.constexpr(reference.STREAM)
_UNIT = tl.constexpr(2.0**-23)


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

    seed, position: int64 scalars. first_token, TILE: multiples of 4."""
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
