"""RMS norm: alone, with the residual's addition, with quantised results."""

import torch

from kernels.torch.elementwise import rms_norm as torch_rms_norm
from kernels.triton.norm import add_rms_norm, rms_norm, rms_norm_quantised
from tests.gpu.checks.errors import num_different, poison, row_error, worst

EPS = 1e-6
BF16_ROUNDING = 8e-3
"""The kernel rounds twice, to bf16 (2^-9 each) of elements up to the row's largest."""
FP8_ROUNDING = 0.07
"""A value of float8_e4m3fn is 2^-4 of itself away at most, and the row's largest is exact."""


def check(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Against the torch operation on float32 copies of the inputs."""
    x_TE, residual_TE = (_randn(num_rows, width, dtype, device) for _ in range(2))
    weight_E = _randn(1, width, dtype, device)[0]
    reference = torch_rms_norm(x_TE.float(), weight_E.float(), EPS)
    out = rms_norm(x_TE, weight_E, EPS, out_TE=poison(torch.empty_like(x_TE)))
    summed = residual_TE + x_TE
    reference_of_sum = torch_rms_norm(summed.float(), weight_E.float(), EPS)
    normed, new_residual = add_rms_norm(x_TE.clone(), residual_TE.clone(), weight_E, EPS)
    return worst(
        row_error(out, reference),
        row_error(normed, reference_of_sum),
        num_different(new_residual, summed),
    )


def check_quantised(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Values times scales against the float32 norm."""
    x_TE = _randn(num_rows, width, torch.bfloat16, device)
    weight_E = _randn(1, width, torch.bfloat16, device)[0]
    values, scales_T = rms_norm_quantised(x_TE, weight_E, EPS, dtype)
    reference = torch_rms_norm(x_TE.float(), weight_E.float(), EPS)
    return row_error(values.float() * scales_T[:, None], reference)


def _randn(num_rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(num_rows, width, dtype=dtype, device=device)
