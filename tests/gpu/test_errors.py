"""The measures of errors see NaN, and what a row with small results hides."""

import math

import pytest
import torch

from tests.gpu.checks.errors import num_different, poison, row_error, scaled_error, worst


def test_errors_are_scaled_by_the_reference_and_see_nan_everywhere():
    reference = torch.tensor([0.0, -4.0, 2.0])
    assert scaled_error(reference.clone(), reference) == 0
    assert scaled_error(torch.tensor([0.0, -4.0, 3.0]), reference) == 0.25
    assert math.isnan(scaled_error(poison(torch.empty(3)), reference))
    assert math.isnan(worst(0.0, math.nan, 1.0))
    minus_infinity = torch.tensor([-math.inf, 1.0])
    assert scaled_error(minus_infinity.clone(), minus_infinity) == 0
    assert scaled_error(torch.tensor([0.0, 1.0]), minus_infinity) == math.inf
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        scaled_error(reference, reference[:2])


def test_whole_numbers_must_be_the_same():
    reference = torch.tensor([1, 2, 3])
    assert num_different(torch.tensor([1, 0, 3]), reference) == 1
    assert num_different(poison(torch.empty(3, dtype=torch.int64)), reference) == 3
    with pytest.raises(ValueError, match="int32"):
        num_different(reference.int(), reference)


def test_a_row_with_small_results_is_judged_like_the_others():
    reference = torch.tensor([[100.0, 50.0], [0.1, 0.0], [0.0, 0.0]])
    assert row_error(reference.clone(), reference) == 0
    assert row_error(reference + torch.tensor([[0.0], [0.01], [0.0]]), reference) == pytest.approx(
        0.1
    )
    assert math.isnan(row_error(poison(torch.empty(3, 2)), reference))
    assert row_error(torch.empty(0, 2), torch.empty(0, 2)) == 0
    with pytest.raises(ValueError, match="the reference has"):
        row_error(reference, reference.T)
