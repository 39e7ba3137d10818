"""Noise of the device, and so its Philox, against that of torch."""

import numpy as np
import pytest
import torch

from tests.gpu.device import on_gpu
from tests.kernels.triton.philox_launches import noise_of_rows, reference_noise


@pytest.mark.parametrize("vocab_size", [1, 3, 63, 1023, 1025, on_gpu(151936)])
def test_the_noise_is_that_of_the_torch_backend(vocab_size):
    seeds = torch.tensor(np.array([0, 7, 2**64 - 1], np.uint64).astype(np.int64).tolist())
    positions = torch.tensor([0, 5, 2**33 + 1])
    noise = noise_of_rows(seeds, positions, vocab_size).cpu()
    expected = reference_noise(seeds, positions, vocab_size)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)
