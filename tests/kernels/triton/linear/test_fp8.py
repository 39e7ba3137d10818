"""Rounding to float8 and products of it, in the interpreter; the CPU has a float8 product too."""

import pytest
import torch
import torch.nn.functional as F

from kernels.triton.activation import gated_rounded
from kernels.triton.fp8_rounding import FP8_MAX, quantise_rows, reference_quantise_rows
from kernels.triton.linear import fp8 as module
from kernels.triton.linear.fp8 import (
    float8_linear,
    join_float8,
    library_multiplies_blocks,
    prepare_float8,
    reference_float8_linear,
    scaled_product,
)
from kernels.triton.norm import add_rms_norm_rounded
from tests.gpu.checks.fp8_linear import SUM_ERROR


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fresh memory holds NaN."""
    empty = torch.empty
    monkeypatch.setattr(module.torch, "empty", lambda *a, **k: empty(*a, **k).fill_(float("nan")))


def make_weight(num_outputs, num_inputs, *, grouped=False):
    return prepare_float8(
        *reference_quantise_rows(torch.randn(num_outputs, num_inputs), grouped=grouped)
    )


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


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 128), (3, 384), (2, 2176)])
def test_groups_are_rounded_one_by_one(num_tokens, width):
    torch.manual_seed(width)
    x = torch.randn(num_tokens, width) * torch.logspace(-3, 3, width)
    q, scale = quantise_rows(x, grouped=True)
    rows = [quantise_rows(part.contiguous()) for part in x.split(128, dim=1)]
    assert torch.equal(q.float(), torch.cat([part.float() for part, _ in rows], dim=1))
    assert torch.equal(scale, torch.cat([part for _, part in rows], dim=1))


def test_a_given_scale_is_that_of_all_tokens_and_cuts_what_is_beyond():
    x = torch.tensor([[1.0, -2.0, 900.0], [0.0, 3.1, -5000.0]])
    q, scale = quantise_rows(x, given=torch.tensor([2.0]))
    assert scale.tolist() == [[2.0], [2.0]]
    assert q.float().tolist() == [[0.5, -1.0, 448.0], [0.0, 1.5, -448.0]]


def test_the_largest_value_of_a_row_is_the_largest_number():
    x = torch.tensor([[1e-3, -2e-3], [3e4, 1.0]])
    q, scale = quantise_rows(x)
    assert q.float()[0, 1] == -FP8_MAX
    assert q.float()[1, 0] == FP8_MAX
    torch.testing.assert_close(q.float().abs().amax(dim=1) * scale[:, 0], x.abs().amax(dim=1))


def test_a_row_of_zeros_stays_zero():
    q, scale = quantise_rows(torch.zeros(2, 32))
    assert (q.float() == 0).all()
    assert scale.isfinite().all()


def test_a_row_is_rounded_alike_alone_and_in_a_crowd():
    x = torch.randn(9, 48)
    q, scale = quantise_rows(x)
    alone_q, alone_scale = quantise_rows(x[4:5])
    assert torch.equal(alone_q.float()[0], q.float()[4])
    assert torch.equal(alone_scale[0], scale[4])


def test_rows_of_a_wider_tensor_are_read_in_place():
    wide = torch.full((4, 300), float("nan"))
    wide[:, 10:266] = torch.randn(4, 256)
    for grouped in (False, True):
        q, scale = quantise_rows(wide[:, 10:266], grouped=grouped)
        expected_q, expected = quantise_rows(wide[:, 10:266].contiguous(), grouped=grouped)
        assert torch.equal(q.float(), expected_q.float())
        assert torch.equal(scale, expected)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_inputs", "num_outputs", "dtype"),
    [
        (1, 128, 48, torch.float32),
        (17, 384, 70, torch.float32),
        (64, 256, 64, torch.float16),
        (65, 256, 130, torch.float32),
    ],
)
def test_the_product_is_that_of_the_rounded_numbers(
    num_tokens, num_inputs, num_outputs, dtype, grouped, batch_invariant
):
    torch.manual_seed(0)
    x, bias = torch.randn(num_tokens, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    weight = make_weight(num_outputs, num_inputs, grouped=grouped)
    result = float8_linear(x, weight, bias, batch_invariant=batch_invariant)
    expected = reference_float8_linear(*quantise_rows(x, grouped=grouped), weight, bias)
    assert result.dtype == dtype
    tolerance = SUM_ERROR if dtype == torch.float32 else 2**-11
    assert (result.float() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("grouped", "num_outputs"), [(False, 32), (True, 32), (True, 256)])
def test_many_inputs_are_summed_in_splits(grouped, num_outputs):
    torch.manual_seed(3)
    x, weight = torch.randn(3, 1280), make_weight(num_outputs, 1280, grouped=grouped)
    if num_outputs == 256:  # a scale a block
        weight = prepare_float8(
            weight.weight_NE, torch.rand(2, 10).repeat_interleave(128, dim=0) + 0.5
        )
        assert weight.scales_NG.shape == (2, 10)
    expected = reference_float8_linear(*quantise_rows(x, grouped=grouped), weight)
    result = float8_linear(x, weight)
    assert (result - expected).abs().max() <= SUM_ERROR * expected.abs().max()


def test_inputs_that_fill_no_step_are_read_to_their_end():
    torch.manual_seed(4)
    x, weight = torch.randn(2, 200), make_weight(32, 200)
    expected = reference_float8_linear(*quantise_rows(x), weight)
    assert (float8_linear(x, weight) - expected).abs().max() <= SUM_ERROR * expected.abs().max()


def test_batch_invariant_a_token_has_the_same_bits_whatever_runs_beside_it():
    x, weight = torch.randn(130, 256), make_weight(32, 256, grouped=True)
    crowd = float8_linear(x, weight, batch_invariant=True)
    for token in (0, 63, 129):
        alone = float8_linear(x[token : token + 1], weight, batch_invariant=True)
        assert torch.equal(alone[0], crowd[token])


@pytest.mark.parametrize("grouped", [False, True])
def test_rounding_costs_a_few_percent(grouped):
    torch.manual_seed(1)
    x, w = torch.randn(32, 256), torch.randn(64, 256)
    weight = prepare_float8(*reference_quantise_rows(w, grouped=grouped))
    exact = x @ w.T
    assert (float8_linear(x, weight) - exact).norm() <= 0.05 * exact.norm()


def test_the_library_product_has_the_meaning_of_the_reference():
    torch.manual_seed(2)
    x, weight = torch.randn(16, 64), make_weight(32, 64)
    q, scale = reference_quantise_rows(x)
    expected = reference_float8_linear(q, scale, weight)
    try:
        result = scaled_product(q, scale, weight, torch.bfloat16)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no float8 product by rows here: {error}")
    assert (result.float() - expected).abs().max() <= 2**-8 * expected.abs().max()


def blocks_product(a, b, scale_a, recipe_a, scale_b, recipe_b, *, output_dtype):
    """torch's product of blocks as its source checks layouts and as cuBLAS reads memory."""
    (rows, inputs), outputs = a.shape, b.shape[1]
    groups = inputs // 128
    stride = -(-groups // 4) * 4
    assert (recipe_a, recipe_b) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    assert rows % 4 == 0
    assert (a.stride(), b.stride()) == ((inputs, 1), (1, inputs))
    assert (scale_a.shape, scale_a.stride()) == ((rows, groups), (1, rows))
    assert (scale_b.shape, scale_b.stride()) == ((stride, outputs // 128), (1, stride))
    of_tokens = scale_a.as_strided((rows * groups,), (1,), scale_a.storage_offset())
    of_blocks = scale_b.as_strided((stride * outputs // 128,), (1,), scale_b.storage_offset())
    result = torch.zeros(rows, outputs)
    m, n = torch.arange(rows), torch.arange(outputs)
    for group in range(groups):
        k = slice(128 * group, 128 * (group + 1))
        part = a[:, k].float() @ b[k].float()
        scales_N = of_blocks[n // 128 * stride + group]
        result += part * of_tokens[group * rows + m][:, None] * scales_N
    return result.to(output_dtype)


@pytest.mark.parametrize(("rows", "inputs"), [(66, 640), (129, 512), (68, 256)])
def test_blocks_go_to_the_library_in_the_layouts_that_it_reads(monkeypatch, rows, inputs):
    monkeypatch.setattr(module.F, "scaled_mm", blocks_product)
    torch.manual_seed(rows)
    codes = make_weight(384, inputs).weight_NE
    scales = (torch.rand(3, inputs // 128) + 0.5).repeat_interleave(128, dim=0)
    weight = prepare_float8(codes, scales, blocks_by_library=True)
    x = torch.randn(rows, inputs).bfloat16()
    expected = reference_float8_linear(*quantise_rows(x, grouped=True), weight)
    result = float8_linear(x, weight)
    assert result.shape == (rows, 384)
    assert (result.float() - expected).abs().max() <= 2**-8 * expected.abs().max()
    joined = join_float8([weight, weight])  # as a layer's device says, which here has none
    assert joined.library_scales_GN is None
    own = float8_linear(x[:5].float(), weight)  # our kernel reads scales in columns, too
    assert (own - expected[:5]).abs().max() <= SUM_ERROR * expected[:5].abs().max()


@pytest.mark.parametrize("rows", [1, 6])
def test_scales_in_columns_are_those_in_rows(rows):
    x, gate_up = torch.randn(rows, 384), torch.randn(rows, 768)
    residual, weight = torch.randn(rows, 384), torch.ones(384)
    for rounded in (
        lambda **options: quantise_rows(x, **options),
        lambda **options: gated_rounded(gate_up, **options),
        lambda **options: add_rms_norm_rounded(x, residual.clone(), weight, 1e-6, **options),
    ):
        codes, scales = rounded(grouped=True)
        same_codes, columns = rounded(grouped=True, in_columns=True)
        assert torch.equal(codes.float(), same_codes.float())
        assert torch.equal(scales, columns)
        assert columns.stride() == (1, -(-rows // 4) * 4)


@pytest.mark.parametrize(
    ("capability", "cuda", "expected"),
    [
        ((9, 0), "12.9", True),
        ((9, 0), "13.0", True),
        ((9, 0), "12.8", False),
        ((8, 9), "13.0", False),
        ((10, 0), "13.0", False),
    ],
)
def test_the_library_multiplies_blocks_on_hopper_since_cuda_12_9(
    monkeypatch, capability, cuda, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert library_multiplies_blocks(torch.device("cuda")) is expected
    assert not library_multiplies_blocks(torch.device("cpu"))


def test_joined_weights_keep_their_scales_and_take_the_largest_of_their_activations():
    one, other = make_weight(32, 64), make_weight(16, 64)
    joined = join_float8(
        [
            prepare_float8(one.weight_NE, one.scales_NG, torch.tensor([0.25])),
            prepare_float8(other.weight_NE, other.scales_NG, torch.tensor([0.5])),
        ]
    )
    assert joined.num_outputs == 48
    assert joined.input_scale.tolist() == [0.5]
    assert torch.equal(joined.weight_NE[32:].float(), other.weight_NE.float())
    assert torch.equal(joined.scales_NG, torch.cat([one.scales_NG, other.scales_NG]))


def test_row_tiles_that_run_side_by_side_are_all_of_them(monkeypatch):
    scales = torch.rand(2, 2).repeat_interleave(128, dim=0)
    weight = prepare_float8(make_weight(256, 256, grouped=True).weight_NE, scales)
    monkeypatch.setattr(module, "ROW_TILES", 2)
    x = torch.randn(290, 256)
    expected = reference_float8_linear(*quantise_rows(x, grouped=True), weight)
    result = float8_linear(x, weight)
    assert (result - expected).abs().max() <= SUM_ERROR * expected.abs().max()
    joined = join_float8([weight, weight])
    assert joined.scales_NG.shape == (4, 2)
    assert join_float8([weight, make_weight(32, 256, grouped=True)]).scales_NG.shape == (288, 2)


def test_no_tokens_give_no_rows():
    assert float8_linear(torch.zeros(0, 16), make_weight(32, 16)).shape == (0, 32)


def test_wrong_arguments_are_refused_by_name():
    weight = make_weight(32, 16)
    with pytest.raises(ValueError, match=r"scales \[5, 1\] for a float8 weight \[32, 16\]"):
        prepare_float8(weight.weight_NE, torch.ones(5, 1))
    with pytest.raises(ValueError, match=r"x_TE is float32 \[2, 17\].*\[2, 16\]"):
        float8_linear(torch.ones(2, 17), weight)
    with pytest.raises(ValueError, match="x_TE is float64"):
        float8_linear(torch.ones(2, 16).double(), weight)
    with pytest.raises(ValueError, match=r"bias_N is float32 \[31\].*\[32\]"):
        float8_linear(torch.ones(2, 16), weight, torch.ones(31))
