"""Products of few rows against torch; alone, behind a norm, and with their activation."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.activation import gelu_tanh_and_mul, silu_and_mul
from kernels.triton.linear.dense import linear_reference
from kernels.triton.linear.few_rows import (
    FewRowsProducts,
    ResidualNorm,
    choose_splits,
    lines_of_step,
)
from kernels.triton.norm import add_rms_norm, add_rms_norm_reference
from tests.gpu.device import DEVICE

EPS = 1e-5
PRODUCTS = FewRowsProducts(torch.device(DEVICE))


def operands(rows, outputs, inputs):
    """In float16: the interpreter multiplies no bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * rows, inputs, generator=generator).half()
    weight = torch.randn(outputs, inputs, generator=generator).half() / inputs**0.5
    return x[:rows], x[rows:], weight, torch.rand(outputs, generator=generator).half()


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "splits"),
    [(1, 1, 8, 1), (3, 63, 136, 1), (16, 65, 1544, 4), (2, 130, 512, 2), (5, 64, 4096, 16)],
)
def test_products_equal_torch(rows, outputs, inputs, splits):
    assert choose_splits(outputs, inputs) == splits
    x, _, weight, bias = operands(rows, outputs, inputs)
    for given in (None, bias):
        for _ in range(2):  # the second finds the counters as the first left them
            out = PRODUCTS.linear(x, weight, given)
            expected = linear_reference(x, weight, given)
            torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


def test_rows_that_lie_apart_and_a_part_of_a_weight():
    x, _, weight, _ = operands(3, 70, 264)
    wide = torch.full((3, 300), float("nan"), dtype=x.dtype)
    wide[:, :264] = x
    held = torch.full((72, 272), float("nan"), dtype=x.dtype)
    held[:70, :264] = weight
    out = PRODUCTS.linear(wide[:, :264], held[:70, :264])
    assert torch.equal(out, PRODUCTS.linear(x, weight))


@pytest.mark.parametrize("norms", [False, True])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(norms):
    x, residual, weight, _ = operands(16, 70, 520)

    def product(rows):
        norm = None
        if norms:
            own = residual[rows]
            norm = ResidualNorm(own, weight[0], EPS, torch.empty_like(own))
        return PRODUCTS.linear(x[rows], weight, norm=norm)

    whole = product(slice(16))
    for rows in (slice(1), slice(2, 7), slice(15, 16)):
        assert torch.equal(product(rows), whole[rows])


@pytest.mark.parametrize(
    ("activation", "apart"), [("silu", silu_and_mul), ("gelu_tanh", gelu_tanh_and_mul)]
)
def test_gate_and_up_have_the_bits_of_their_own_launches(activation, apart):
    # of whole numbers, whose sums have no order
    x, _, weight, _ = (each.mul(2).round() for each in operands(4, 2 * 67, 264))
    found = PRODUCTS.linear(x, weight, activation=activation)
    gate, up = (PRODUCTS.linear(x, part.contiguous()) for part in weight.chunk(2))
    assert torch.equal(found, apart(torch.cat((gate, up), dim=1)))


@pytest.mark.parametrize("norm_dtype", [torch.float16, torch.float32])
def test_a_norm_within_is_as_near_to_float32_as_one_before(norm_dtype):
    x, residual, weight, bias = operands(3, 130, 640)
    norm_weight = torch.rand(640).to(norm_dtype)
    norm = ResidualNorm(residual, norm_weight, EPS, torch.full_like(x, float("nan")))
    before = residual.clone()
    within = PRODUCTS.linear(x, weight, bias, norm=norm)
    assert torch.equal(residual, before), "other programs still read it"
    normed, sums = add_rms_norm(x.clone(), residual.clone(), norm_weight, EPS)
    assert torch.equal(norm.sums_TE, sums)
    exact = add_rms_norm_reference(*(each.float() for each in (x, residual, norm_weight)), EPS)[0]
    exact = exact @ weight.float().T + bias.float()
    error = (within.float() - exact).abs().max()
    apart = (PRODUCTS.linear(normed, weight, bias).float() - exact).abs().max()
    assert error <= 1.2 * apart


@triton.jit
def _lines_kernel(weight_ptr, out_ptr, first, N: tl.constexpr, E: tl.constexpr):
    n_N = tl.arange(0, 64)
    lines = lines_of_step(weight_ptr + tl.minimum(n_N, N - 1) * E, first, E, 128)
    at = n_N[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out_ptr + at, lines.to(tl.int64))


@pytest.mark.parametrize("inputs", [256, 200])
def test_what_is_asked_for_ahead_is_every_line_of_the_weight_and_no_other(inputs):
    weight = torch.zeros(20, inputs, dtype=torch.float16)
    asked = set()
    for first in (0, 128):
        lines = torch.zeros(128, dtype=torch.int64)
        _lines_kernel[(1,)](weight, lines, first, 20, inputs)
        asked |= {(line - weight.data_ptr()) // 2 for line in lines.tolist()}
    assert all(0 <= element < weight.numel() for element in asked)
    expected = {row * inputs + at for row in range(20) for at in range(0, inputs, 64)}
    assert asked - {row * inputs + inputs - 1 for row in range(20)} == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: ((x.repeat(4, 1), w), {}), r"x is \[20, 40\]; make it \[T, E\], T from 1"),
        (lambda x, w, b: ((x[0], w), {}), r"x is \[40\]"),
        (lambda x, w, b: ((x, w[:, :-1]), {}), r"weight_NE is float16 \[10, 39\]"),
        (lambda x, w, b: ((x.float(), w.float()), {}), "x_TE is float32"),
        (lambda x, w, b: ((x, w, b[:-1]), {}), r"bias_N is float16 \[9\]"),
        (lambda x, w, b: ((x, w, b), {"activation": "silu"}), "gate and up .* no bias"),
        (lambda x, w, b: ((x, w), {"activation": "relu2"}), "no product has the activation relu2"),
        (
            lambda x, w, b: ((x, w), {"norm": ResidualNorm(x[:1], w[0], EPS, x)}),
            r"residual_TE is float16 \[1, 40\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    x, _, weight, bias = operands(5, 10, 40)
    arguments, options = change(x, weight, bias)
    with pytest.raises(ValueError, match=words):
        PRODUCTS.linear(*arguments, **options)
