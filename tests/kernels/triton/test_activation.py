"""Gated activations against torch, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from kernels.torch import elementwise
from kernels.triton.activation import (
    gated_rounded,
    gelu_tanh_and_mul,
    silu_and_mul,
)
from kernels.triton.fp8_rounding import quantise_rows

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


@pytest.mark.parametrize("rounding", ["row", "group", "given"])
@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize(("F", "dtype"), [(384, torch.float32), (4224, torch.float16)])
def test_a_rounded_product_has_the_bits_of_rounding_afterwards(
    F: int, dtype: torch.dtype, is_gelu: bool, rounding: str
) -> None:
    gate_up_TF2 = _gate_up(3, F, dtype)
    gate_up_TF2[1] = 0
    given = torch.tensor([0.01]) if rounding == "given" else None
    how: dict[str, Any] = {"grouped": rounding == "group", "given": given}
    gated_TF = gelu_tanh_and_mul(gate_up_TF2) if is_gelu else silu_and_mul(gate_up_TF2)
    expected_TF, expected_TG = quantise_rows(gated_TF, **how)
    codes_TF, scales_TG = gated_rounded(gate_up_TF2, is_gelu=is_gelu, **how)
    assert torch.equal(codes_TF.view(torch.uint8), expected_TF.view(torch.uint8))
    assert torch.equal(scales_TG, expected_TG)


@pytest.mark.parametrize("F", [63, 4097])
def test_rows_of_any_length_have_one_scale(F: int) -> None:
    gate_up_TF2 = _gate_up(3, F)
    expected_TF, expected_TG = quantise_rows(silu_and_mul(gate_up_TF2))
    codes_TF, scales_TG = gated_rounded(gate_up_TF2)
    assert torch.equal(codes_TF.view(torch.uint8), expected_TF.view(torch.uint8))
    assert torch.equal(scales_TG, expected_TG)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd() -> None:
    gate_up_TF2 = _gate_up(5, 130)
    crowd_TF = silu_and_mul(gate_up_TF2)
    assert torch.equal(silu_and_mul(gate_up_TF2[3:4].clone()), crowd_TF[3:4])


def test_an_empty_step_gives_no_rows() -> None:
    assert silu_and_mul(torch.empty(0, 64)).shape == (0, 32)
    codes_TF, scales_TG = gated_rounded(torch.empty(0, 64))
    assert (codes_TF.shape, scales_TG.shape) == ((0, 32), (0, 1))


def test_what_does_not_fit_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"\[2, 63\]; make it \[T, 2F\]"):
        silu_and_mul(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="gate_up_TF2 is int32"):
        silu_and_mul(torch.zeros(2, 64, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"out_TF is float32 \[2, 33\].*\[2, 32\]"):
        silu_and_mul(torch.zeros(2, 64), out_TF=torch.zeros(2, 33))
    with pytest.raises(ValueError, match=r"\[2, 63\]; make it \[T, 2F\]"):
        gated_rounded(torch.zeros(2, 63))
    with pytest.raises(ValueError, match="rows of 32 numbers are not scaled by 128"):
        gated_rounded(torch.zeros(2, 64), grouped=True)
