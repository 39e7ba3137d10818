"""RMS norm against torch, in Triton's interpreter."""

from typing import Any

import pytest
import torch

from kernels.torch.elementwise import rms_norm as torch_rms_norm
from kernels.triton.fp8_rounding import quantise_rows
from kernels.triton.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_rounded,
    rms_norm,
)

WIDTHS = [1, 63, 64, 896, 1025, 5376]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-10}


def _rows(T: int, E: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(T * E)
    return (torch.randn(T, E) * 3).to(dtype)


def _assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, float(expected.float().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[expected.dtype] * scale)


@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm_is_that_of_torch(E: int, dtype: torch.dtype) -> None:
    x_TE, weight_E = _rows(3, E, dtype), torch.rand(E).to(dtype)
    before_TE = x_TE.clone()
    out_TE = torch.full_like(x_TE, float("nan"))
    assert rms_norm(x_TE, weight_E, 1e-6, out_TE=out_TE) is out_TE
    _assert_close(out_TE, torch_rms_norm(x_TE, weight_E, 1e-6))
    assert torch.equal(x_TE, before_TE)
    assert torch.equal(rms_norm(x_TE, weight_E, 1e-6), out_TE)


@pytest.mark.parametrize("E", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_residual_is_updated_in_place_and_its_norm_replaces_x(
    E: int, dtype: torch.dtype
) -> None:
    x_TE, residual_TE, weight_E = _rows(2, E, dtype), _rows(5, E, dtype)[:2], torch.rand(E)
    weight_E = weight_E.to(dtype)
    expected_TE, summed_TE = add_rms_norm_reference(x_TE, residual_TE, weight_E, 1e-5)
    out_TE, new_residual_TE = add_rms_norm(x_TE, residual_TE, weight_E, 1e-5)
    assert out_TE is x_TE
    assert new_residual_TE is residual_TE
    assert torch.equal(residual_TE, summed_TE)
    _assert_close(out_TE, expected_TE)


def test_a_float32_weight_keeps_the_product_in_float32() -> None:
    x_TE, weight_E = _rows(4, 320, torch.float16), 1 + torch.randn(320)
    _assert_close(rms_norm(x_TE, weight_E, 1e-6), torch_rms_norm(x_TE, weight_E, 1e-6))
    expected_TE, _ = add_rms_norm_reference(x_TE, x_TE, weight_E, 1e-6)
    out_TE, _ = add_rms_norm(x_TE.clone(), x_TE.clone(), weight_E, 1e-6)
    _assert_close(out_TE, expected_TE)


def test_bfloat16_is_within_its_roundings_of_torch() -> None:
    """The interpreter truncates where the device rounds: 2^-7 for each of two roundings."""
    x_TE, weight_E = _rows(4, 320, torch.bfloat16), torch.rand(320).bfloat16()
    expected_TE = torch_rms_norm(x_TE, weight_E, 1e-6)
    out_TE = rms_norm(x_TE, weight_E, 1e-6)
    torch.testing.assert_close(out_TE, expected_TE, rtol=2**-6, atol=0)


def test_rows_of_a_wider_tensor_are_read_where_they_lie_and_nothing_beside_is_written() -> None:
    wide_TE = _rows(3, 200)
    before_TE = wide_TE.clone()
    weight_E = torch.rand(63)
    expected_TE = torch_rms_norm(wide_TE[:, 100:163].clone(), weight_E, 1e-6)
    rms_norm(wide_TE[:, 100:163], weight_E, 1e-6, out_TE=wide_TE[:, 100:163])
    _assert_close(wide_TE[:, 100:163], expected_TE)
    assert torch.equal(wide_TE[:, :100], before_TE[:, :100])
    assert torch.equal(wide_TE[:, 163:], before_TE[:, 163:])


@pytest.mark.parametrize("rounding", ["row", "group", "given"])
@pytest.mark.parametrize(("E", "dtype"), [(384, torch.float32), (2176, torch.float16)])
def test_a_rounded_norm_has_the_bits_of_rounding_afterwards(
    E: int, dtype: torch.dtype, rounding: str
) -> None:
    x_TE, residual_TE, weight_E = _rows(4, E, dtype), _rows(7, E, dtype)[:4], torch.rand(E)
    x_TE[1] = residual_TE[1] = 0
    weight_E = weight_E.to(dtype)
    given = torch.tensor([0.002]) if rounding == "given" else None
    how: dict[str, Any] = {"grouped": rounding == "group", "given": given}
    normed_TE, summed_TE = add_rms_norm(x_TE.clone(), residual_TE.clone(), weight_E, 1e-6)
    expected_TE, expected_TG = quantise_rows(normed_TE, **how)
    codes_TE, scales_TG = add_rms_norm_rounded(x_TE, residual_TE, weight_E, 1e-6, **how)
    assert torch.equal(codes_TE.view(torch.uint8), expected_TE.view(torch.uint8))
    assert torch.equal(scales_TG, expected_TG)
    assert torch.equal(residual_TE, summed_TE)


def test_a_row_has_the_same_bits_alone_and_in_a_crowd() -> None:
    x_TE, weight_E = _rows(5, 896), torch.rand(896)
    crowd_TE = rms_norm(x_TE, weight_E, 1e-6)
    assert torch.equal(rms_norm(x_TE[3:4].clone(), weight_E, 1e-6), crowd_TE[3:4])


def test_an_empty_step_gives_no_rows() -> None:
    assert rms_norm(torch.empty(0, 64), torch.ones(64), 1e-6).shape == (0, 64)


def test_what_does_not_fit_is_refused_by_name() -> None:
    x_TE, weight_E = torch.zeros(2, 64), torch.ones(64)
    with pytest.raises(ValueError, match=r"weight_E is float32 \[63\].*\[64\]"):
        rms_norm(x_TE, torch.ones(63), 1e-6)
    with pytest.raises(ValueError, match="weight_E is float16"):
        rms_norm(x_TE, weight_E.half(), 1e-6)
    with pytest.raises(ValueError, match="residual_TE is float16"):
        add_rms_norm(x_TE, x_TE.half(), weight_E, 1e-6)
    with pytest.raises(ValueError, match="out_TE is int8"):
        rms_norm(x_TE, weight_E, 1e-6, out_TE=x_TE.to(torch.int8))
    with pytest.raises(ValueError, match="rows of 64 numbers are not scaled by 128"):
        add_rms_norm_rounded(x_TE, x_TE, weight_E, 1e-6, grouped=True)
    with pytest.raises(ValueError, match=r"given is float64 \[1\]"):
        add_rms_norm_rounded(x_TE, x_TE, weight_E, 1e-6, given=torch.ones(1).double())
    with pytest.raises(ValueError, match="3 dimensions; flatten"):
        rms_norm(torch.zeros(2, 2, 64), weight_E, 1e-6)
    with pytest.raises(ValueError, match="40000 elements"):
        rms_norm(torch.zeros(1, 40000), torch.zeros(40000), 1e-6)
