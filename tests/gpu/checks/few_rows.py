"""Products of few rows of our own, with the norm before and the activation behind them within."""

import torch
import torch.nn.functional as F

from kernels.interface.operations import Activation
from kernels.torch import elementwise
from kernels.triton.linear.few_rows import FewRowsProducts, ResidualNorm
from tests.gpu.checks.errors import num_different, num_different_in_batches, poison, row_error

EPS = 1e-5
ROUNDING = 1e-2
"""Of one product in bf16; with a norm and an activation, three roundings more."""
FUSED_ROUNDING = 2e-2


def check(
    rows: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    *,
    norms: bool = False,
    activation: Activation | None = None,
    prefetch_bytes: int = 0,
    device: str,
) -> float:
    """The error of the last of three launches behind each other, to float64; NaN if their bits
    differ, or the sums are not torch's."""
    products = FewRowsProducts(torch.device(device), prefetch_bytes=prefetch_bytes)
    x_TE, residual_TE = (torch.randn(rows, inputs, device=device).to(dtype) for _ in range(2))
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5).to(dtype)
    bias_N = None if activation else torch.randn(outputs, device=device).to(dtype)
    norm_E = torch.rand(inputs, device=device).to(dtype)
    sums_TE = poison(torch.empty_like(x_TE))
    norm = ResidualNorm(residual_TE, norm_E, EPS, sums_TE) if norms else None
    options = {"norm": norm, "activation": activation}
    # each finds the counters as the one before left them
    found = [products.linear(x_TE, weight_NE, bias_N, **options) for _ in range(3)]
    expected_TN = x_TE.double()
    if norms:
        expected_TN = elementwise.rms_norm(residual_TE + x_TE, norm_E, EPS).double()
    expected_TN = expected_TN @ weight_NE.double().T
    if bias_N is not None:
        expected_TN += bias_N.double()
    if activation:
        gate_TN, up_TN = expected_TN.chunk(2, dim=1)
        expected_TN = (
            F.silu(gate_TN) if activation == "silu" else F.gelu(gate_TN, approximate="tanh")
        )
        expected_TN = expected_TN * up_TN
    differing = num_different(found[0], found[2]) + num_different(found[1], found[2])
    differing += num_different(sums_TE, residual_TE + x_TE) if norms else 0
    return float("nan") if differing else row_error(found[2], expected_TN)


def check_same_bits(inputs: int, outputs: int, *, norms: bool, device: str) -> float:
    """In bfloat16, see `num_different_in_batches`."""
    products = FewRowsProducts(torch.device(device))
    x_TE, residual_TE = (torch.randn(16, inputs, device=device).bfloat16() for _ in range(2))
    weight_NE = torch.randn(outputs, inputs, device=device).mul_(inputs**-0.5).bfloat16()
    norm_E = torch.rand(inputs, device=device).bfloat16()

    def product(some: slice) -> torch.Tensor:
        sums_TE = torch.empty_like(x_TE[some])
        norm = ResidualNorm(residual_TE[some], norm_E, EPS, sums_TE) if norms else None
        return products.linear(x_TE[some], weight_NE, norm=norm)

    return num_different_in_batches(product, (1, 2, 3, 9, 16))
