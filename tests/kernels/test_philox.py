"""Philox4x32-10 against the known answers that Random123 publishes (kat_vectors)."""

import numpy as np
import pytest

from kernels.torch.sampling import philox_4x32

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter, key, words):
    result = philox_4x32(
        tuple(np.uint64(word) for word in counter), tuple(np.uint64(word) for word in key)
    )
    assert tuple(int(word) for word in result) == words


def test_many_counters_at_once_give_what_each_gives_alone():
    counters = np.arange(100, dtype=np.uint64)[None]
    keys = np.array([[1], [2**31], [ONES]], np.uint64)
    zero = np.uint64(0)
    together = philox_4x32((counters, zero, zero, zero), (keys, zero))
    for row, key in enumerate(keys[:, 0]):
        for index in (0, 1, 63, 99):
            alone = philox_4x32((counters[0, index], zero, zero, zero), (key, zero))
            assert [int(word) for word in alone] == [int(w[row, index]) for w in together]
