"""Experts whose weights stay float8 or 4 and 8 bits: products of sorted pairs, as in `moe_linear`.

All experts' outputs are rows of one weight, those of expert x from x * (rows of an expert) on."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface.weights import ExpertActivation, ExpertBiases
from kernels.triton.activation import gated_expert
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.fp8_rounding import quantise_rows
from kernels.triton.linear.expert_routing import (
    ExpertTiles,
    check_pairs,
    pairs_of_tile,
    tile_of_program,
)
from kernels.triton.linear.fp8 import BLOCK_K, Float8Weight, add_float8
from kernels.triton.linear.packed_reads import add_packed
from kernels.triton.linear.quantised import BLOCK_J, BLOCK_N, weight_constants
from kernels.triton.linear.quantised_weights import QuantisedWeight
from kernels.triton.tensor_checks import FLOATS, check_tensor

ExpertStack = QuantisedWeight | Float8Weight
GATED = ("silu", "swiglu_oai", "gelu_tanh")
"""Activations of experts with a gate."""


@dataclass(frozen=True, slots=True)
class QuantisedExperts:
    """The experts of one layer; a `kernels.interface.weights.ExpertWeights`.

    Attributes:
        gate_up: [X * 2F, E]: of each expert F outputs of gate, then F of up; without a gate those
            alone.
        down: [X * E, F].
    """

    num_experts: int
    gate_up: ExpertStack
    down: ExpertStack
    activation: ExpertActivation = "silu"
    biases: ExpertBiases | None = None

    def multiply_gate_up(self, x_TE: torch.Tensor, tiles: ExpertTiles, top_k: int) -> torch.Tensor:
        return grouped_quantised(
            x_TE,
            self.gate_up,
            self.num_experts,
            tiles,
            pairs_a_row=top_k,
            activation=self.activation,
            bias_XN=None if self.biases is None else self.biases[0],
        )

    def multiply_down(self, h_PF: torch.Tensor, tiles: ExpertTiles) -> torch.Tensor:
        bias_XE = None if self.biases is None else self.biases[1]
        return grouped_quantised(h_PF, self.down, self.num_experts, tiles, bias_XN=bias_XE)


@triton.jit(do_not_specialize=["max_tiles"])
def grouped_quantised_kernel(
    a_ptr,  # [R, K], rows `a_stride` apart; float8 if FLOAT8. Pair p reads row p // PAIRS_A_ROW
    a_scale_ptr,  # float32 [R, G] if FLOAT8
    w_ptr,  # [X * rows of an expert, J]: uint8 or int8; float8 [.., K] if FLOAT8
    scales_ptr,  # [X * rows of an expert / SCALE_ROWS, G]
    offsets_ptr,  # the same; unused without HAS_OFFSETS
    supers_ptr,  # as in load_scaled
    bias_ptr,  # [X * rows of an expert]; unused without HAS_BIAS
    out_ptr,  # [P, N]
    sorted_ptr,  # int32 [P]
    tile_expert_ptr,  # int32 [L]
    tile_start_ptr,  # int32 [L]
    tile_stop_ptr,  # int32 [L]
    max_tiles,
    a_stride,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_OFFSETS: tl.constexpr,
    ZEROS: tl.constexpr,
    LEVELS: tl.constexpr,
    FLOAT8: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    CLAMPED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_J: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    J: tl.constexpr = K * BITS // 8
    IN_BOUNDS: tl.constexpr = N % BLOCK_N == 0 and J % BLOCK_J == 0
    GROUPED: tl.constexpr = GROUP < K
    ONE_SCALE: tl.constexpr = SCALE_ROWS > 1 and N % BLOCK_N == 0 and not GATED  # registers
    tile, expert, n, d = tile_of_program(tile_expert_ptr, max_tiles, NUM_N, GROUP_TILES)
    if expert >= 0:
        pair_M, valid_M = pairs_of_tile(tile, sorted_ptr, tile_start_ptr, tile_stop_ptr, BLOCK_M)
        a_row_M = pair_M // PAIRS_A_ROW
        a_M = a_ptr + a_row_M * a_stride
        n_start = n // d * BLOCK_N
        n_N = n_start + tl.arange(0, BLOCK_N)
        # outputs past N are other rows' numbers, and are not stored
        gate_start = expert * (2 * N if GATED else N) + n_start
        gate_N = gate_start + tl.arange(0, BLOCK_N)
        up_N = gate_N + N
        acc_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        up_NM = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        scale_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
        for j_start in range(0, J, BLOCK_J):
            j_J = j_start + tl.arange(0, BLOCK_J)
            valid_JM = (j_J < J)[:, None] & valid_M[None, :]
            k_J = j_J if BITS == 8 else j_J // 16 * 32 + j_J % 16
            x_JM = tl.load(a_M[None, :] + k_J[:, None], mask=valid_JM, other=0.0)
            if FLOAT8:
                if GROUPED:
                    at_M = a_scale_ptr + a_row_M * (K // GROUP) + j_start // GROUP
                    scale_M = tl.load(at_M, mask=valid_M, other=0.0)
                acc_NM = add_float8(
                    acc_NM, x_JM, scale_M, w_ptr, scales_ptr, gate_N, gate_start, j_start, ROWS, K,
                    GROUPED, SCALE_ROWS, ONE_SCALE, IN_BOUNDS, BLOCK_J,
                )  # fmt: skip
                if GATED:
                    up_NM = add_float8(
                        up_NM, x_JM, scale_M, w_ptr, scales_ptr, up_N, gate_start + N, j_start,
                        ROWS, K, GROUPED, SCALE_ROWS, ONE_SCALE, IN_BOUNDS, BLOCK_J,
                    )  # fmt: skip
            else:
                x_high_JM = x_JM
                if BITS == 4:
                    at_JM = a_M[None, :] + k_J[:, None] + 16
                    x_high_JM = tl.load(at_JM, mask=valid_JM, other=0.0)
                acc_NM = add_packed(
                    acc_NM, x_JM, x_high_JM, w_ptr, scales_ptr, offsets_ptr, supers_ptr, gate_N,
                    j_start, ROWS, J, BITS, GROUP * BITS // 8, HAS_OFFSETS, ZEROS, LEVELS,
                    IN_BOUNDS, BLOCK_N, BLOCK_J,
                )  # fmt: skip
                if GATED:
                    up_NM = add_packed(
                        up_NM, x_JM, x_high_JM, w_ptr, scales_ptr, offsets_ptr, supers_ptr, up_N,
                        j_start, ROWS, J, BITS, GROUP * BITS // 8, HAS_OFFSETS, ZEROS,
                        LEVELS, IN_BOUNDS, BLOCK_N, BLOCK_J,
                    )  # fmt: skip
        if FLOAT8 and not GROUPED:
            row_scale_M = tl.load(a_scale_ptr + a_row_M, mask=valid_M, other=0.0)[None, :]
            acc_NM *= tl.load(scales_ptr + gate_N, mask=gate_N < ROWS)[:, None] * row_scale_M
            if GATED:
                up_NM *= tl.load(scales_ptr + up_N, mask=up_N < ROWS)[:, None] * row_scale_M
        if HAS_BIAS:
            acc_NM += tl.load(bias_ptr + gate_N, mask=n_N < N, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_NM += tl.load(bias_ptr + up_N, mask=n_N < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_NM = gated_expert(acc_NM, up_NM, CLAMPED, IS_GELU)
        if SQUARED:
            acc_NM = tl.maximum(acc_NM, 0.0) * acc_NM  # relu(up)^2
        out_NM = out_ptr + pair_M[None, :] * N + n_N[:, None]
        keep_NM = (n_N < N)[:, None] & valid_M[None, :]
        tl.store(out_NM, acc_NM.to(out_ptr.dtype.element_ty), mask=keep_NM)


_launches = BoundLaunches(grouped_quantised_kernel)


def grouped_quantised(
    a_RK: torch.Tensor,
    weight: ExpertStack,
    num_experts: int,
    tiles: ExpertTiles,
    *,
    pairs_a_row: int = 1,
    activation: ExpertActivation | None = None,
    bias_XN: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `moe_linear.grouped_linear`, with weights rounded to the dtype of a, or of float8 with a
    rounded to float8 as `fp8_linear.quantise_rows` does.

    Args:
        a_RK: [R, K], the last dimension contiguous; R * pairs_a_row is the number of pairs.
        weight: of all experts, as in `QuantisedExperts`.
        tiles: of all pairs.
    """
    shape, device = (a_RK.shape[0], weight.num_inputs), a_RK.device
    check_tensor("activations", a_RK, shape, FLOATS, device, contiguous_dims=1)
    num_pairs = check_pairs(a_RK, pairs_a_row, tiles)
    constants, launch = grouped_configuration(
        weight, num_experts, tiles.tile_rows, a_RK.dtype, activation
    )
    constants["HAS_BIAS"] = bias_XN is not None
    if bias_XN is not None:
        check_tensor("biases", bias_XN, bias_XN.shape, a_RK.dtype, device)
    num_outputs = constants["N"]
    out_PN = torch.empty(num_pairs, num_outputs, dtype=a_RK.dtype, device=device)
    max_tiles = tiles.tile_expert_L.numel()
    if not max_tiles:
        return out_PN
    scale_RG = None
    more: tuple[torch.Tensor | None, ...] = (None, None)
    if isinstance(weight, Float8Weight):
        a_RK, scale_RG = quantise_rows(a_RK, grouped=weight.is_grouped, given=weight.input_scale)
        codes = weight.weight_NE
    else:
        codes, more = weight.packed_NJ, (weight.offsets_NG, weight.supers_NSC)
    grid = (max_tiles * triton.cdiv(num_outputs, constants["BLOCK_N"]),)
    constants |= {"PAIRS_A_ROW": pairs_a_row} | launch
    of_tiles = tiles.sorted_pairs_P, tiles.tile_expert_L, tiles.tile_start_L, tiles.tile_stop_L
    _launches(
        (a_RK, scale_RG, codes, weight.scales_NG, *more, bias_XN, out_PN, *of_tiles),
        tuple(constants.values()),
        lambda: Launch(grid, (max_tiles, a_RK.stride(0)), constants),
    )
    return out_PN


def grouped_configuration(
    weight: ExpertStack,
    num_experts: int,
    tile_rows: int,
    dtype: torch.dtype,
    activation: ExpertActivation | None,
) -> tuple[dict[str, Any], dict[str, int]]:
    """(constants, launch options)."""
    of_weight: dict[str, Any]
    is_float8 = isinstance(weight, Float8Weight)
    if isinstance(weight, Float8Weight):
        group = weight.num_inputs // weight.scales_NG.shape[1]
        of_weight = {"K": weight.num_inputs, "BITS": 8, "GROUP": group, "HAS_OFFSETS": False}
        of_weight |= {"ZEROS": False, "LEVELS": ()}
    else:
        of_weight = weight_constants(weight)
    many = tile_rows > 64
    constants = of_weight | {
        "ROWS": weight.num_outputs,
        "N": weight.num_outputs // num_experts // (2 if activation in GATED else 1),
        "FLOAT8": is_float8,
        "SCALE_ROWS": weight.rows_a_scale if isinstance(weight, Float8Weight) else 1,
        "GATED": activation in GATED,
        "SQUARED": activation == "relu2",
        "CLAMPED": activation == "swiglu_oai",
        "IS_GELU": activation == "gelu_tanh",
        "HAS_BIAS": False,
        "BLOCK_M": tile_rows,
        "BLOCK_N": BLOCK_N,
        "BLOCK_J": BLOCK_K if is_float8 else BLOCK_J,
        "GROUP_TILES": 1 if tile_rows == 16 else 4,
    }
    if dtype == torch.float32 and not is_float8:  # no tensor cores: more would fill the registers
        return constants, {"num_warps": 4, "num_stages": 2}
    return constants, {"num_warps": 8 if many else 4, "num_stages": 3}
