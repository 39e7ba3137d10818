"""Products with packed weights against the reference, in the interpreter."""

import pytest
import torch
import triton
import triton.language as tl

from kernels.triton.linear import quantised as module
from kernels.triton.linear.gguf_blocks import from_gguf
from kernels.triton.linear.packed_reads import load_codes
from kernels.triton.linear.quantised import (
    choose_splits,
    dequantise_to,
    quantised_linear,
    reference_quantised_linear,
)
from kernels.triton.linear.quantised_weights import (
    QuantisedWeight,
    dequantise,
    from_zero_points,
    join_outputs,
    narrowed,
    quantise,
)
from tests.gpu.device import DEVICE
from tests.kernels.gguf_parts import random_part


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def make_weight(num_outputs, num_inputs, num_bits, group_size, symmetric=False):
    torch.manual_seed(num_outputs + num_inputs)
    w = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    return quantise(w, num_bits=num_bits, group_size=group_size, symmetric=symmetric)


def assert_near(result, expected, tolerance):
    assert result.isfinite().all()
    assert (result.float() - expected).abs().max() <= tolerance * expected.abs().max()


LAYOUTS = [
    (4, 32, False),
    (4, 32, True),
    (4, 64, False),
    (4, 128, True),
    (4, 256, False),
    (8, 16, True),
    (8, 32, False),
    (8, 64, True),
    (8, 128, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_bits", "group_size", "symmetric"), LAYOUTS)
def test_few_rows_give_the_reference(num_bits, group_size, symmetric, dtype):
    weight = make_weight(70, 512, num_bits, group_size, symmetric)
    x, bias = torch.randn(5, 512).to(dtype), torch.randn(70).to(dtype)
    result = quantised_linear(x, weight, bias)
    assert result.dtype == dtype
    expected = reference_quantised_linear(x, weight, bias)
    assert_near(result, expected, 1e-5 if dtype == torch.float32 else 1e-3)


def with_zero_points(group_size, num_outputs=40, num_inputs=512):
    """As GPTQ and AWQ give them: scales of float16, zero points from 0 to 16; 8: none are kept."""
    torch.manual_seed(group_size)
    q = torch.randint(0, 16, (num_outputs, num_inputs))
    zeros = torch.randint(0, 17, (num_outputs, num_inputs // group_size)).float()
    scales = (torch.rand(zeros.shape) / 64).half()
    symmetric = from_zero_points(q, torch.full_like(zeros, 8), scales, 4, group_size)
    return [narrowed(symmetric), narrowed(from_zero_points(q, zeros, scales, 4, group_size))]


GROUPS = [16, 32, 64, 128, 512]


@pytest.mark.parametrize("group_size", GROUPS)
def test_products_of_codes_are_as_near_as_those_of_rounded_weights(group_size):
    for weight in with_zero_points(group_size):
        x = torch.randn(5, 512).half()
        exact = x.double() @ dequantise(weight).double().T
        rounded = (x.double() @ dequantise(weight).half().double().T).half()
        error = (quantised_linear(x, weight) - exact).norm()
        assert 0 < error <= 1.05 * (rounded - exact).norm()


@triton.jit
def widen_codes_kernel(
    packed_ptr, scales_ptr, offsets_ptr, supers_ptr, out_ptr, GROUP_J: tl.constexpr,
    HAS_OFFSETS: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    n_N = tl.arange(0, 64).to(tl.int64)
    for start in range(0, 256, 64):
        low_NJ, high_NJ = load_codes(
            packed_ptr, scales_ptr, offsets_ptr, supers_ptr, n_N, start, 40, 256, GROUP_J,
            HAS_OFFSETS, ZEROS, False, 64, 64, tl.bfloat16,
        )  # fmt: skip
        j_J = start + tl.arange(0, 64)
        out_NJ = out_ptr + n_N[:, None] * 512 + (j_J // 16 * 32 + j_J % 16)[None, :]
        tl.store(out_NJ, low_NJ.to(tl.float32), mask=(n_N < 40)[:, None])
        tl.store(out_NJ + 16, high_NJ.to(tl.float32), mask=(n_N < 40)[:, None])


def widened_codes(weight):
    wide = torch.empty(40, 512)
    widen_codes_kernel[(1,)](
        weight.packed_NJ,
        weight.scales_NG,
        weight.offsets_NG,
        weight.supers_NSC,
        wide,
        GROUP_J=weight.group_size // 2,
        HAS_OFFSETS=weight.offsets_NG is not None,
        ZEROS=weight.has_zero_points,
    )
    return wide


@pytest.mark.parametrize("group_size", GROUPS)
def test_codes_become_bfloat16_as_if_rounded_once(group_size):
    for weight in with_zero_points(group_size):
        wide = widened_codes(weight)
        expected = dequantise(weight)
        if group_size >= 128:  # the scale is still to come
            expected = expected / weight.scales_NG.float().repeat_interleave(group_size, dim=1)
            expected = expected.round()
        cut = (expected.view(torch.int32) & -65536).view(torch.float32)  # as the interpreter rounds
        assert torch.equal(wide, cut if DEVICE == "cpu" else expected.bfloat16().float())


@pytest.mark.parametrize("type_name", ["Q4_1", "Q4_K"])
def test_minima_are_added_to_codes_within_three_roundings(type_name):
    part = random_part(type_name, 40, 512)
    weight = narrowed(from_gguf(part.arrays["blocks"], 40, 512, type_name))
    expected = dequantise(weight)
    group_NGI = expected.unflatten(1, (-1, weight.group_size))
    most_NG1 = group_NGI.abs().amax(dim=2, keepdim=True)  # and so of code 8, the middle one
    rounding = 2**-7 if DEVICE == "cpu" else 2**-8  # the interpreter cuts off
    error_NGI = (widened_codes(weight) - expected).unflatten(1, (-1, weight.group_size)).abs()
    assert (error_NGI <= rounding * (group_NGI.abs() + 2.5 * most_NG1)).all()
    x = torch.randn(5, 512).half()
    exact = x.double() @ expected.double().T
    rounded = (x.double() @ expected.half().double().T).half()
    assert 0 < (quantised_linear(x, weight) - exact).norm() <= 2 * (rounded - exact).norm()


def test_joined_weights_keep_zero_points_only_if_all_have_them():
    symmetric, with_zeros = with_zero_points(64)
    others = make_weight(40, 512, 4, 64)
    for parts, has_zero_points in (
        ([symmetric, with_zeros], True),
        ([with_zeros, others, symmetric], False),
    ):
        joined = join_outputs(parts)
        assert joined.has_zero_points == has_zero_points
        expected = torch.cat([dequantise(part) for part in parts])
        torch.testing.assert_close(dequantise(joined), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("num_rows", [1, 16, 17, 63, 64, 65, 100])
@pytest.mark.parametrize("num_bits", [4, 8])
def test_every_number_of_rows(num_bits, num_rows):
    weight = make_weight(33, 96, num_bits, 32)
    x = torch.randn(num_rows, 96)
    assert_near(quantised_linear(x, weight), reference_quantised_linear(x, weight), 1e-5)


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_bits"), [(129, 130, 4), (100, 64, 8)])
def test_wide_tiles_give_the_reference(num_rows, num_outputs, num_bits, monkeypatch):
    monkeypatch.setattr(module, "dequantise_to", None)  # not to memory
    weight = make_weight(num_outputs, 128, num_bits, 128, symmetric=True)
    x = torch.randn(num_rows, 128).half()
    assert_near(quantised_linear(x, weight), reference_quantised_linear(x, weight), 1e-3)


@pytest.mark.parametrize("num_bits", [4, 8])
def test_one_group_a_row_may_have_any_length(num_bits):
    weight = make_weight(8, 288, num_bits, 288, True)
    x = torch.randn(3, 288)
    assert_near(quantised_linear(x, weight), reference_quantised_linear(x, weight), 1e-5)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_bits"),
    [(20, 1568, 4), (20, 1568, 8), (64, 1152, 4), (64, 1088, 8)],
)
def test_splits_that_do_not_divide_the_inputs(num_outputs, num_inputs, num_bits):
    weight = make_weight(num_outputs, num_inputs, num_bits, 32)
    assert choose_splits(num_outputs, weight.packed_NJ.shape[1]) > 1
    x, bias = torch.randn(2, num_inputs), torch.randn(num_outputs)
    result = quantised_linear(x, weight, bias)
    assert_near(result, reference_quantised_linear(x, weight, bias), 1e-5)


def test_splits_follow_from_the_shape_of_the_weight():
    assert choose_splits(4096, 2048) == 4
    assert choose_splits(64, 64) == 1
    assert choose_splits(100_000, 2048) == 1
    assert choose_splits(64, 1 << 20) == 16


@pytest.mark.parametrize("num_bits", [4, 8])
def test_a_row_gets_the_same_bits_alone_and_in_a_crowd(num_bits):
    weight = make_weight(65, 1024, num_bits, 64)
    x = torch.randn(64, 1024)
    crowd = quantised_linear(x, weight)
    for row in (0, 23, 63):
        assert torch.equal(quantised_linear(x[row : row + 1], weight)[0], crowd[row])


@pytest.mark.parametrize(("num_bits", "group_size", "symmetric"), LAYOUTS)
def test_widening_gives_the_reference(num_bits, group_size, symmetric):
    weight = make_weight(67, 256, num_bits, group_size, symmetric)
    expected = dequantise(weight)
    torch.testing.assert_close(dequantise_to(weight, torch.float32), expected, rtol=0, atol=1e-6)
    half = dequantise_to(weight, torch.float16)
    torch.testing.assert_close(half, expected.half(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("num_rows", [3, 70])
def test_inputs_in_another_order(num_rows):
    plain = make_weight(12, 128, 4, 32)
    weight = QuantisedWeight(
        num_bits=4,
        group_size=32,
        num_inputs=128,
        num_outputs=12,
        packed_NJ=plain.packed_NJ,
        scales_NG=plain.scales_NG,
        offsets_NG=plain.offsets_NG,
        input_order_E=torch.randperm(128),
    )
    x = torch.randn(num_rows, 128)
    assert_near(quantised_linear(x, weight), reference_quantised_linear(x, weight), 1e-5)


def test_scales_may_be_stored_in_half_precision():
    plain = make_weight(12, 128, 4, 32)
    weight = QuantisedWeight(
        num_bits=4,
        group_size=32,
        num_inputs=128,
        num_outputs=12,
        packed_NJ=plain.packed_NJ,
        scales_NG=plain.scales_NG.half(),
        offsets_NG=plain.offsets_NG.half(),
    )
    x = torch.randn(3, 128)
    assert_near(quantised_linear(x, weight), reference_quantised_linear(x, weight), 1e-5)


def test_rows_of_a_wider_tensor_are_read_in_place():
    weight = make_weight(9, 64, 8, 32)
    wide = torch.full((4, 100), float("nan"))
    wide[:, 10:74] = torch.randn(4, 64)
    x = wide[:, 10:74]
    assert torch.equal(quantised_linear(x, weight), quantised_linear(x.contiguous(), weight))


def test_no_rows_give_no_rows():
    assert quantised_linear(torch.zeros(0, 64), make_weight(9, 64, 4, 32)).shape == (0, 9)


def test_wrong_arguments_are_refused_by_name():
    weight = make_weight(9, 64, 4, 32)
    with pytest.raises(ValueError, match=r"x_TE is float32 \[2, 63\].*\[2, 64\]"):
        quantised_linear(torch.zeros(2, 63), weight)
    with pytest.raises(ValueError, match="x_TE is float64"):
        quantised_linear(torch.zeros(2, 64).double(), weight)
    with pytest.raises(ValueError, match=r"bias_N is float32 \[8\].*\[9\]"):
        quantised_linear(torch.zeros(2, 64), weight, torch.zeros(8))
    with pytest.raises(ValueError, match=r"bias_N is float16.*make it float32"):
        quantised_linear(torch.zeros(2, 64), weight, torch.zeros(9).half())
    with pytest.raises(TypeError, match="cannot widen"):
        dequantise_to(weight, torch.int8)
