"""Philox on the device against the published answers and the torch one."""

import numpy as np
import pytest
import torch

from kernels.torch import sampling as torch_sampling
from kernels.triton.philox import (
    gumbel_noise_of_vocabulary,
    random_words,
    random_words_reference,
)

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
def test_known_answers_that_random123_publishes(counter, key, words):
    assert random_words(torch.tensor([counter]), torch.tensor([key])).tolist() == [list(words)]


@pytest.mark.parametrize("number", [0, 1, 255, 256, 257])
def test_random_counters_give_the_words_of_the_torch_philox(number):
    generator = torch.Generator().manual_seed(number)
    counter = torch.randint(0, 2**32, (number, 4), generator=generator)
    key = torch.randint(0, 2**32, (number, 2), generator=generator)
    assert torch.equal(random_words(counter, key), random_words_reference(counter, key))


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 1023, 1025])
def test_the_noise_is_that_of_the_torch_backend(vocab_size):
    seeds = torch.from_numpy(np.array([0, 7, 2**64 - 1], np.uint64).astype(np.int64))
    positions = torch.tensor([0, 5, 2**33 + 1])
    noise = gumbel_noise_of_vocabulary(seeds, positions, vocab_size)
    expected = torch_sampling.gumbel_noise_of_vocabulary(seeds, positions, vocab_size)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="counter is int32"):
        random_words(torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"key is int64 \[2, 2\]"):
        random_words(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64))
