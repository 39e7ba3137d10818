"""The experiment's product, interpreted."""

import pytest
import torch

from scripts.gpu.skinny_linear import check


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 512, 64), (16, 384, 128), (5, 128, 64)]
)
def test_it_multiplies_with_and_without_splits(rows, inputs, outputs):
    assert check(rows, inputs, outputs, torch.float32, "cpu") < 1e-6
