"""RMS norm: alone, with the residual's addition, rounded to float8."""

import torch

from kernels.torch.elementwise import rms_norm as torch_rms_norm
from kernels.triton.fp8_rounding import quantise_rows
from kernels.triton.norm import add_rms_norm, add_rms_norm_rounded, rms_norm
from tests.gpu.checks.errors import num_different, poison, row_error, worst
from tests.gpu.checks.fp8_linear import num_different_rounded, roundings

EPS = 1e-6
BF16_ROUNDING = 8e-3
"""The kernel rounds twice, to bf16 (2^-9 each) of elements up to the row's largest."""


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


def check_rounded(num_rows: int, width: int, dtype: torch.dtype, *, device: str) -> float:
    """Numbers that differ from the norm's, rounded in a kernel of its own: by row, by groups and by
    a given scale."""
    x_TE, residual_TE = (_randn(num_rows, width, dtype, device) for _ in range(2))
    weight_E = _randn(1, width, dtype, device)[0]
    normed, _ = add_rms_norm(x_TE.clone(), residual_TE.clone(), weight_E, EPS)
    return worst(
        *(
            num_different_rounded(
                add_rms_norm_rounded(x_TE, residual_TE.clone(), weight_E, EPS, **how),
                quantise_rows(normed, **how),
            )
            for how in roundings(device)
        )
    )


def _randn(num_rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(num_rows, width, dtype=dtype, device=device)
