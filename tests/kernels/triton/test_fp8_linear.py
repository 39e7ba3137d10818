"""Rounding to float8 and products of it, in the interpreter; the CPU has a float8 product too."""

import pytest
import torch

from kernels.triton import fp8_linear as module
from kernels.triton.fp8_linear import (
    LARGEST,
    float8_linear,
    prepare_float8,
    quantise_rows,
    reference_float8_linear,
    reference_quantise_rows,
    scaled_product,
)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 16), (5, 63), (3, 128), (2, 5000)])
def test_rows_are_rounded_as_torch_rounds(num_tokens, width, dtype):
    torch.manual_seed(width)
    x = (torch.randn(num_tokens, width) * 10).to(dtype)
    q, scale = quantise_rows(x)
    expected_q, expected_scale = reference_quantise_rows(x)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert q.dtype == torch.float8_e4m3fn
    assert torch.equal(q.view(torch.uint8), expected_q.view(torch.uint8))


def test_the_largest_value_of_a_row_is_the_largest_number():
    x = torch.tensor([[1e-3, -2e-3], [3e4, 1.0]])
    q, scale = quantise_rows(x)
    assert q.float()[0, 1] == -LARGEST
    assert q.float()[1, 0] == LARGEST
    torch.testing.assert_close(q.float().abs().amax(dim=1) * scale, x.abs().amax(dim=1))


def test_a_row_of_zeros_stays_zero():
    q, scale = quantise_rows(torch.zeros(2, 32))
    assert (q.float() == 0).all()
    assert (scale == 1).all()


def test_a_row_is_rounded_alike_alone_and_in_a_crowd():
    x = torch.randn(9, 48)
    q, scale = quantise_rows(x)
    alone_q, alone_scale = quantise_rows(x[4:5])
    assert torch.equal(alone_q.float()[0], q.float()[4])
    assert torch.equal(alone_scale[0], scale[4])


def test_rows_of_a_wider_tensor_are_read_in_place():
    wide = torch.full((4, 100), float("nan"))
    wide[:, 10:74] = torch.randn(4, 64)
    q, scale = quantise_rows(wide[:, 10:74])
    assert torch.equal(q.float() * scale[:, None], quantised(wide[:, 10:74].contiguous()))


def quantised(x):
    q, scale = reference_quantise_rows(x)
    return q.float() * scale[:, None]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_the_product_is_that_of_the_rounded_numbers(num_tokens, with_bias):
    torch.manual_seed(0)
    x, w = torch.randn(num_tokens, 64), torch.randn(48, 64)
    bias = torch.randn(48) if with_bias else None
    result = float8_linear(x, prepare_float8(w), bias)
    expected = quantised(x) @ quantised(w).T + (0 if bias is None else bias)
    assert (result - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_rounding_costs_a_few_percent():
    torch.manual_seed(1)
    x, w = torch.randn(32, 256), torch.randn(64, 256)
    exact = x @ w.T
    error = float8_linear(x, prepare_float8(w)) - exact
    assert error.norm() <= 0.05 * exact.norm()


def test_the_library_product_has_the_meaning_of_the_reference():
    torch.manual_seed(2)
    x, weight = torch.randn(16, 64), prepare_float8(torch.randn(32, 64))
    q, scale = reference_quantise_rows(x)
    expected = reference_float8_linear(q, scale, weight)
    try:
        result = scaled_product(q, scale, weight, torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no float8 product by rows here: {error}")
    assert (result.float() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_stored_float8_weights_keep_their_bits_and_scales():
    stored = torch.randn(32, 16).to(torch.float8_e4m3fn)
    weight = prepare_float8(stored, torch.tensor(0.5))
    assert torch.equal(weight.weight_NE.view(torch.uint8), stored.view(torch.uint8))
    assert weight.scale_N.tolist() == [0.5] * 32
    assert (weight.num_outputs, weight.num_inputs) == (32, 16)


def test_no_tokens_give_no_rows():
    assert float8_linear(torch.zeros(0, 16), prepare_float8(torch.ones(32, 16))).shape == (0, 32)


def test_wrong_arguments_are_refused_by_name():
    weight = prepare_float8(torch.ones(32, 16))
    with pytest.raises(ValueError, match="multiples of 16"):
        prepare_float8(torch.ones(30, 16))
    with pytest.raises(ValueError, match="scales go with"):
        prepare_float8(torch.ones(32, 16), torch.ones(32))
    with pytest.raises(ValueError, match="5 scales for 32"):
        prepare_float8(torch.ones(32, 16).to(torch.float8_e4m3fn), torch.ones(5))
    with pytest.raises(ValueError, match=r"x_TE is float32 \[2, 17\].*\[2, 16\]"):
        float8_linear(torch.ones(2, 17), weight)
    with pytest.raises(ValueError, match="x_TE is float64"):
        float8_linear(torch.ones(2, 16).double(), weight)
    with pytest.raises(ValueError, match=r"bias_N is float32 \[31\].*\[32\]"):
        float8_linear(torch.ones(2, 16), weight, torch.ones(31))
