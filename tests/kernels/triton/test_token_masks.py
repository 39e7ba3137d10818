"""Bit masks on the device against the plain definition."""

import pytest
import torch

from kernels.interface.sampling_rows import num_mask_words
from kernels.triton.sampling.logits_processors import (
    apply_token_masks,
    apply_token_masks_reference,
)
from kernels.triton.sampling.row_maxima import TILE
from tests.gpu.device import on_gpu
from tests.kernels.triton.columns import columns_of


def masked(is_masked, num_rows=None):
    return columns_of(len(is_masked), num_rows=num_rows, is_masked_N=torch.tensor(is_masked))


def apply(logits, masks, columns):
    apply_token_masks(logits, masks, columns.num_rows_1, columns.is_masked_N)


def random_masks(rows, vocab_size):
    shape = (rows, num_mask_words(vocab_size))
    generator = torch.Generator().manual_seed(vocab_size)
    return torch.randint(-(2**31), 2**31, shape, generator=generator).int()


@pytest.mark.parametrize(
    "vocab_size", [1, 31, 32, 33, 63, 257, 1000, TILE - 1, TILE, TILE + 1, on_gpu(151936)]
)
def test_masked_tokens_become_impossible_and_the_others_stay(vocab_size):
    logits = torch.randn(3, vocab_size)
    masks, is_masked = random_masks(3, vocab_size), [True, False, True]
    expected = apply_token_masks_reference(logits, masks, torch.tensor(is_masked))
    apply(logits, masks, masked(is_masked))
    assert torch.equal(logits, expected)


def test_all_allowed_and_none_allowed():
    logits = torch.randn(2, 70)
    masks = torch.tensor([[-1, -1, -1], [0, 0, 0]], dtype=torch.int32)
    before = logits.clone()
    apply(logits, masks, masked([True, True]))
    assert torch.equal(logits[0], before[0])
    assert (logits[1] == -torch.inf).all()


def test_rows_beyond_the_count_and_the_rest_of_wider_rows_stay():
    wide = torch.randn(3, 100)
    before = wide.clone()
    masks = torch.zeros(3, 2, dtype=torch.int32)
    apply(wide[:, :40], masks, masked([True] * 3, num_rows=2))
    assert (wide[:2, :40] == -torch.inf).all()
    assert torch.equal(wide[:, 40:], before[:, 40:])
    assert torch.equal(wide[2], before[2])


def test_a_mask_of_the_wrong_width_is_refused():
    with pytest.raises(ValueError, match="masks is"):
        apply(torch.zeros(1, 33), torch.zeros(1, 1, dtype=torch.int32), masked([True]))
