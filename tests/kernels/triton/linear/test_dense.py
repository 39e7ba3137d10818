"""Dense products of our own against torch; and a row has the same bits in every batch."""

import pytest
import torch

from kernels.triton.linear.dense import dense_linear, linear_reference
from tests.kernels.compiled.cases import dense_products


def operands(rows, outputs, inputs, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype) / inputs**0.5
    return x, weight, torch.randn(outputs, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 1, 1), (3, 63, 37), (63, 65, 64), (129, 70, 130), (2, 128, 128), (0, 5, 7)],
)
def test_products_equal_torch(rows, outputs, inputs, dtype, has_bias):
    x, weight, bias = operands(rows, outputs, inputs, dtype)
    given = bias if has_bias else None
    out = dense_linear(x, weight, given)
    assert out.shape == (rows, outputs) and out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    expected = linear_reference(x, weight, given)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)


def test_more_row_tiles_than_run_side_by_side_and_the_widest_tile():
    x, weight, bias = operands(9 * 64 + 5, 130, 33, torch.float32)
    torch.testing.assert_close(
        dense_linear(x, weight, bias), linear_reference(x, weight, bias), atol=1e-5, rtol=1e-5
    )
    x, weight, bias = operands(130, 8200, 64, torch.float16)
    torch.testing.assert_close(
        dense_linear(x, weight, bias), linear_reference(x, weight, bias), atol=2e-3, rtol=2e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype):
    x, weight, bias = operands(130, 67, 161, dtype)
    whole = dense_linear(x, weight, bias)
    for rows in (1, 2, 3, 17, 64, 65, 127, 128, 129):
        assert torch.equal(dense_linear(x[:rows], weight, bias), whole[:rows])
        assert torch.equal(dense_linear(x[130 - rows :], weight, bias), whole[130 - rows :])
    for row in range(0, 130, 13):
        assert torch.equal(dense_linear(x[row : row + 1], weight, bias)[0], whole[row])


def test_rows_may_lie_apart():
    x, weight, bias = operands(5, 9, 40, torch.float32)
    wide = torch.full((5, 50), float("nan"))
    wide[:, :40] = x
    assert torch.equal(dense_linear(wide[:, :40], weight, bias), dense_linear(x, weight, bias))


def test_what_is_not_a_row_of_x_is_not_read():
    """Rows behind the last one are NaN, and so are the inputs behind E."""
    x, weight, _ = operands(3, 70, 37, torch.float32)
    memory = torch.full((8, 37), float("nan"))
    memory[:3] = x
    assert torch.equal(dense_linear(memory[:3], weight), dense_linear(x, weight))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x[None], w, b), "x has 3 dimensions"),
        (lambda x, w, b: (x, w[:, :-1], b), r"weight_NE is float32 \[9, 39\]"),
        (lambda x, w, b: (x, w.half(), b), r"weight_NE is float16 .* make it float32"),
        (lambda x, w, b: (x, w, b[:-1]), r"bias_N is float32 \[8\]"),
        (lambda x, w, b: (x.double(), w, b), "x_TE is float64"),
        (lambda x, w, b: (x.T.contiguous().T, w, b), r"x_TE .* contiguous"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        dense_linear(*change(*operands(5, 9, 40, torch.float32)))


def test_the_tile_is_a_function_of_the_weight():
    """A variant a weight, with no number of rows in it."""
    for variant in dense_products():
        assert variant.arguments["num_rows"] == 16
        assert "T" not in variant.constants
        assert variant.constants["BLOCK_T"] >= 64
