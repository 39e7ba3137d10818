"""Random bits as a function of a key and a counter: Philox4x32-10.

J. Salmon, M. Moraes, R. Dror, D. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
A counter-based generator has no state to carry from step to step, so a token's noise depends on
(seed, position, token id) and on nothing else in the batch, and any device can compute the same.
"""

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
NUM_ROUNDS = 10


def philox_4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    key: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random 32-bit words for each counter.

    Args:
        counter: four words, int64 tensors of values in [0, 2**32) that broadcast together.
        key: two words, likewise.

    Returns:
        Four int64 tensors of values in [0, 2**32), of the broadcast shape.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        # int64 products wrap around, which keeps the low 64 bits; the mask drops the sign
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1 = product1.bitwise_and_(_MASK)
        c3 = product0.bitwise_and_(_MASK)
        k0 = (k0 + KEY_INCREMENTS[0]) & _MASK
        k1 = (k1 + KEY_INCREMENTS[1]) & _MASK
    return c0, c1, c2, c3
