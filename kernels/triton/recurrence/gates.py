"""Gates of recurrent layers, and the norm that goes with one: `kernels.torch.recurrence` is the
specification."""

from typing import Literal

import torch
import triton
import triton.language as tl

from kernels.interface.recurrence import GatedNormParams
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.tensor_checks import FLOATS, check_tensor

BLOCK = 1024
"""Numbers a program, about."""


@triton.jit(do_not_specialize=["num_rows"])
def gated_norm_kernel(
    x_TN,  # [T, N]
    gate_TN,  # [T, N]
    weight_N,  # float32 [N], or [SIZE]
    out_TN,  # [T, N], written
    num_rows,
    eps,
    x_stride,
    gate_stride,
    GROUPS: tl.constexpr,  # N / SIZE
    SIZE: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # of groups [GROUPS / TRANSPOSED, TRANSPOSED]
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    IS_SHARED: tl.constexpr,  # the weight, by groups
    PDL: tl.constexpr,
):
    """Groups of a row are normed each for itself; program (some groups, of neighbouring rows)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    group_G = tl.program_id(0).to(tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    column_N = tl.arange(0, BLOCK_N)
    is_inside_GN = (group_G < num_rows * GROUPS)[:, None] & (column_N < SIZE)[None, :]
    row_G = group_G // GROUPS
    column_GN = (group_G % GROUPS * SIZE)[:, None] + column_N[None, :]
    x_GN = tl.load(x_TN + (row_G * x_stride)[:, None] + column_GN, mask=is_inside_GN, other=0.0)
    gate_at_GN = gate_TN + (row_G * gate_stride)[:, None] + column_GN
    gate_GN = tl.load(gate_at_GN, mask=is_inside_GN, other=0.0).to(tl.float32)
    active_GN = 1.0 / (1.0 + tl.exp(-gate_GN))
    if IS_SILU:
        active_GN = gate_GN * active_GN
    x_GN = x_GN.to(tl.float32)
    if GATE_FIRST:
        x_GN = x_GN * active_GN
    x_GN = x_GN * tl.rsqrt(tl.sum(x_GN * x_GN, axis=1) / SIZE + eps)[:, None]
    weight_at_GN = column_GN % SIZE if IS_SHARED else column_GN
    x_GN = x_GN * tl.load(weight_N + weight_at_GN, mask=is_inside_GN, other=0.0)
    if not GATE_FIRST:
        x_GN = x_GN * active_GN
    group_G = group_G % GROUPS
    group_G = group_G % TRANSPOSED * (GROUPS // TRANSPOSED) + group_G // TRANSPOSED
    out_at_GN = out_TN + ((row_G * GROUPS + group_G) * SIZE)[:, None] + column_N[None, :]
    tl.store(out_at_GN, x_GN.to(out_TN.dtype.element_ty), mask=is_inside_GN)


@triton.jit
def gate_kernel(
    x_TN,  # [T, N]
    gate_TN,  # [T, N]
    out_TN,  # [T, N], written
    x_stride,
    gate_stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    """`x * sigmoid(gate)`, or `x * gate`; program (row, columns)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_inside_N = column_N < N
    x_N = tl.load(x_TN + row * x_stride + column_N, mask=is_inside_N, other=0.0).to(tl.float32)
    gate_N = tl.load(gate_TN + row * gate_stride + column_N, mask=is_inside_N, other=0.0)
    gate_N = gate_N.to(tl.float32)
    if IS_SIGMOID:
        gate_N = 1.0 / (1.0 + tl.exp(-gate_N))
    out_N = (x_N * gate_N).to(out_TN.dtype.element_ty)
    tl.store(out_TN + row * N + column_N, out_N, mask=is_inside_N)


def gated_norm(x_TN: torch.Tensor, gate_TN: torch.Tensor, params: GatedNormParams) -> torch.Tensor:
    """See `Operations.gated_norm`.

    Raises:
        ValueError: a tensor of another shape, dtype or device, or groups that no row consists of.
    """
    out_TN = torch.empty(x_TN.shape, dtype=x_TN.dtype, device=x_TN.device)

    def prepare() -> Launch:
        _check(x_TN, gate_TN)
        T, N = x_TN.shape
        widths = (params.size,) if len(params.weight_N) == params.size else (N,)
        check_tensor("weight_N", params.weight_N, widths, torch.float32, x_TN.device)
        if N % (unit := params.size * params.transposed):
            raise ValueError(f"rows of {N} numbers are not groups of {unit}")
        constants = norm_constants(N, params)
        return Launch(
            (triton.cdiv(T * constants["GROUPS"], constants["BLOCK_G"]),),
            (T, params.eps, x_TN.stride(0), gate_TN.stride(0)),
            constants | dependent_launch(x_TN.device) | {"num_warps": num_warps_of(params.size)},
        )

    options = (params.size, params.eps, params.activation, params.gate_first, params.transposed)
    if x_TN.numel():
        _norm_launches((x_TN, gate_TN, params.weight_N, out_TN), options, prepare)
    return out_TN


def num_warps_of(size: int) -> int:
    return min(16, max(4, int(triton.next_power_of_2(size)) // 1024))


def norm_constants(N: int, params: GatedNormParams) -> dict[str, int]:
    padded = int(triton.next_power_of_2(params.size))
    return {
        "GROUPS": N // params.size,
        "SIZE": params.size,
        "TRANSPOSED": params.transposed,
        "BLOCK_G": max(1, BLOCK // padded),
        "BLOCK_N": padded,
        "IS_SILU": params.activation == "silu",
        "GATE_FIRST": params.gate_first,
        "IS_SHARED": len(params.weight_N) == params.size,
    }


def gate(
    x_TN: torch.Tensor, gate_TN: torch.Tensor, activation: Literal["sigmoid"] | None
) -> torch.Tensor:
    """See `Operations.gate`.

    Raises:
        ValueError: tensors of unequal shapes or dtypes.
    """
    out_TN = torch.empty(x_TN.shape, dtype=x_TN.dtype, device=x_TN.device)
    if len(gate_TN) == 1:
        gate_TN = gate_TN.expand(len(x_TN), -1)

    def prepare() -> Launch:
        _check(x_TN, gate_TN)
        T, N = x_TN.shape
        block = min(BLOCK, int(triton.next_power_of_2(N)))
        constants = {"N": N, "BLOCK_N": block, "IS_SIGMOID": activation == "sigmoid"}
        return Launch(
            (T, triton.cdiv(N, block)),
            (x_TN.stride(0), gate_TN.stride(0)),
            constants | dependent_launch(x_TN.device),
        )

    if x_TN.numel():
        _gate_launches((x_TN, gate_TN, out_TN), activation, prepare)
    return out_TN


_norm_launches = BoundLaunches(gated_norm_kernel)
_gate_launches = BoundLaunches(gate_kernel)


def _check(x_TN: torch.Tensor, gate_TN: torch.Tensor) -> None:
    check_tensor("x_TN", x_TN, x_TN.shape, FLOATS, x_TN.device, contiguous_dims=1)
    check_tensor("gate_TN", gate_TN, x_TN.shape, FLOATS, x_TN.device, contiguous_dims=1)
