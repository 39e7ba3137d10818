"""Gated activations against torch, in Triton's interpreter."""

import pytest
import torch

from kernels.torch import elementwise
from kernels.triton.activation import (
    activation_quantised_reference,
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_quantised,
)

# exp overflows to infinity on purpose: x / inf is the right 0
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

WIDTHS = [1, 63, 1024, 1025, 4097]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10}


def _gate_up(T: int, F: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(T + F)
    gate_up_TF2 = torch.randn(T, 2 * F) * 3
    gate_up_TF2[0, 0] = -100.0  # far in the tail, where exp overflows
    gate_up_TF2[-1, 0] = 1e-6
    return gate_up_TF2.to(dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, float(expected.float().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[expected.dtype] * scale)


@pytest.mark.parametrize("F", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_both_activations_are_those_of_torch(F: int, dtype: torch.dtype) -> None:
    gate_up_TF2 = _gate_up(3, F, dtype)
    before_TF2 = gate_up_TF2.clone()
    for ours, theirs in (
        (silu_and_mul, elementwise.silu_and_mul),
        (gelu_tanh_and_mul, elementwise.gelu_tanh_and_mul),
    ):
        out_TF = torch.full((3, F), float("nan"), dtype=dtype)
        assert ours(gate_up_TF2, out_TF=out_TF) is out_TF
        _assert_close(out_TF, theirs(gate_up_TF2))
        assert torch.equal(ours(gate_up_TF2), out_TF)
    assert torch.equal(gate_up_TF2, before_TF2)


def test_bfloat16_is_within_its_roundings_of_torch() -> None:
    """The interpreter truncates where the device rounds: 2^-7 for each of two roundings."""
    gate_up_TF2 = _gate_up(4, 320, torch.bfloat16)[1:].contiguous()
    expected_TF = elementwise.silu_and_mul(gate_up_TF2)
    torch.testing.assert_close(silu_and_mul(gate_up_TF2), expected_TF, rtol=2**-6, atol=0)


def test_gelu_near_zero_loses_nothing() -> None:
    gate_up_TF2 = torch.tensor([[1e-7, -1e-7, 3e-4, 0.0, 1.0, 1.0, 1.0, 1.0]])
    expected_TF = elementwise.gelu_tanh_and_mul(gate_up_TF2)
    torch.testing.assert_close(gelu_tanh_and_mul(gate_up_TF2), expected_TF, rtol=1e-5, atol=0)


def test_rows_of_a_wider_tensor_are_read_where_they_lie_and_nothing_beside_is_written() -> None:
    wide = torch.randn(3, 300)
    out = torch.full((3, 100), float("nan"))
    silu_and_mul(wide[:, 100:226], out_TF=out[:, 20:83])
    _assert_close(out[:, 20:83], elementwise.silu_and_mul(wide[:, 100:226]))
    assert out[:, :20].isnan().all()
    assert out[:, 83:].isnan().all()


@pytest.mark.parametrize("F", [63, 4097])
def test_int8_values_and_scales_are_those_of_quantising_afterwards(F: int) -> None:
    gate_up_TF2 = _gate_up(3, F)
    gate_up_TF2[1] = 0
    values_TF, scales_T = silu_and_mul_quantised(gate_up_TF2, torch.int8)
    expected_TF, expected_T = activation_quantised_reference(gate_up_TF2, torch.int8)
    torch.testing.assert_close(scales_T, expected_T, rtol=1e-5, atol=0)
    # a value beside a tie may fall to either side of it, for the products differ in the last bit
    distance = (values_TF.int() - expected_TF.int()).abs()
    assert int(distance.max()) <= 1
    assert float((distance > 0).float().mean()) < 0.01
    assert not values_TF[1].any()


def test_fp8_values_times_scale_are_the_product_within_the_rounding_of_fp8() -> None:
    gate_up_TF2 = _gate_up(3, 200)
    expected_TF = elementwise.silu_and_mul(gate_up_TF2)
    values_TF, scales_T = silu_and_mul_quantised(gate_up_TF2, torch.float8_e4m3fn)
    _, expected_T = activation_quantised_reference(gate_up_TF2, torch.float8_e4m3fn)
    torch.testing.assert_close(scales_T, expected_T, rtol=1e-5, atol=0)
    # the interpreter loses a carry into the exponent: leave out mantissas that round up to 2
    scaled_TF = expected_TF / expected_T[:, None]
    is_sound_TF = (scaled_TF.abs().frexp().mantissa * 2 < 1.9) & (scaled_TF.abs() > 2**-5)
    error_TF = (values_TF.float() * scales_T[:, None] - expected_TF).abs()
    assert float((error_TF / expected_TF.abs())[is_sound_TF].max()) <= 2**-4 + 1e-4
    assert float(is_sound_TF.float().mean()) > 0.5


def test_a_row_has_the_same_bits_alone_and_in_a_crowd() -> None:
    gate_up_TF2 = _gate_up(5, 130)
    crowd_TF = silu_and_mul(gate_up_TF2)
    assert torch.equal(silu_and_mul(gate_up_TF2[3:4].clone()), crowd_TF[3:4])


def test_an_empty_step_gives_no_rows() -> None:
    assert silu_and_mul(torch.empty(0, 64)).shape == (0, 32)
    values_TF, scales_T = silu_and_mul_quantised(torch.empty(0, 64), torch.int8)
    assert (values_TF.shape, scales_T.shape) == ((0, 32), (0,))


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"\[2, 63\]; make it \[T, 2F\]"):
        silu_and_mul(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="gate_up_TF2 is int32"):
        silu_and_mul(torch.zeros(2, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"out_TF is float32 \[2, 33\].*\[2, 32\]"):
        silu_and_mul(torch.zeros(2, 64), out_TF=torch.zeros(2, 33))
    with pytest.raises(ValueError, match="choose float8_e4m3fn or int8"):
        silu_and_mul_quantised(torch.zeros(2, 64), torch.float16)
