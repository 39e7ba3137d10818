"""Philox on the device against the published answers and the torch one."""

import numpy as np
import pytest
import torch

from tests.kernels.test_philox import KNOWN_ANSWERS
from tests.kernels.triton.philox_launches import (
    noise_of_rows,
    random_words,
    reference_noise,
    reference_random_words,
)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers_that_random123_publishes(counter, key, words):
    assert random_words(torch.tensor([counter]), torch.tensor([key])).tolist() == [list(words)]


@pytest.mark.parametrize("number", [0, 1, 255, 256, 257])
def test_random_counters_give_the_words_of_the_torch_philox(number):
    generator = torch.Generator().manual_seed(number)
    counter = torch.randint(0, 2**32, (number, 4), generator=generator)
    key = torch.randint(0, 2**32, (number, 2), generator=generator)
    assert torch.equal(random_words(counter, key).cpu(), reference_random_words(counter, key))


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 1023, 1025])
def test_the_noise_is_that_of_the_torch_backend(vocab_size):
    seeds = torch.tensor(np.array([0, 7, 2**64 - 1], np.uint64).astype(np.int64).tolist())
    positions = torch.tensor([0, 5, 2**33 + 1])
    noise = noise_of_rows(seeds, positions, vocab_size).cpu()
    expected = reference_noise(seeds, positions, vocab_size)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)
