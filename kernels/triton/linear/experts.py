"""Mixture of experts: the products of sorted pairs with their experts' weights, and their sum.

A pair is computed by one program, in steps along E that follow from the dtype and the tile's rows:
a token's bits depend on the batch only through `tile_rows`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interface.weights import ExpertActivation, ExpertBiases, ExpertRouting, check_experts
from kernels.triton.activation import gated_expert
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.linear.expert_routing import (
    ExpertTiles,
    build_expert_tiles,
    check_pairs,
    pairs_of_tile,
    route,
    tile_of_program,
)
from kernels.triton.linear.quantised_experts import GATED, QuantisedExperts
from kernels.triton.tensor_checks import FLOATS, check_tensor

COMBINED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class TritonExpertWeights:
    """The experts of one layer, contiguous. Raises ValueError: shapes that do not fit each other.

    Attributes:
        gate_up_XNE: [X, 2F, E], F outputs of gate, then F of up, or without a gate [X, F, E]; the
            dtype of the activations.
        down_XEF: [X, E, F] likewise.
    """

    gate_up_XNE: torch.Tensor
    down_XEF: torch.Tensor
    activation: ExpertActivation = "silu"
    biases: ExpertBiases | None = None

    def __post_init__(self) -> None:
        check_experts(self.gate_up_XNE.shape, self.down_XEF.shape, self.activation, self.biases)

    @property
    def num_experts(self) -> int:
        return self.down_XEF.shape[0]

    def multiply_gate_up(self, x_TE: torch.Tensor, tiles: ExpertTiles, top_k: int) -> torch.Tensor:
        return grouped_linear(
            x_TE,
            self.gate_up_XNE,
            tiles,
            pairs_a_row=top_k,
            activation=self.activation,
            bias_XN=None if self.biases is None else self.biases[0],
        )

    def multiply_down(self, h_PF: torch.Tensor, tiles: ExpertTiles) -> torch.Tensor:
        bias_XE = None if self.biases is None else self.biases[1]
        return grouped_linear(h_PF, self.down_XEF, tiles, bias_XN=bias_XE)


def prepare_experts(
    gate_up_XFE: torch.Tensor,
    down_XEF: torch.Tensor,
    activation: ExpertActivation = "silu",
    biases: ExpertBiases | None = None,
) -> TritonExpertWeights:
    """See `Operations.prepare_experts`. Contiguous tensors are kept, not copied."""
    if gate_up_XFE.dtype != down_XEF.dtype or down_XEF.dtype not in FLOATS:
        raise TypeError(
            f"gate_up weights are {gate_up_XFE.dtype} and down weights {down_XEF.dtype}; "
            f"give both in one of {FLOATS}"
        )
    weights = gate_up_XFE.contiguous(), down_XEF.contiguous()
    return TritonExpertWeights(*weights, activation, biases)


def choose_tile_rows(num_tokens: int, top_k: int, num_experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile for a step of this shape: 16, 64 or 128.

    64 is where wgmma begins. float32 has no tensor-core path and always takes 16."""
    rows_an_expert = num_tokens * top_k / num_experts
    if dtype == torch.float32 or rows_an_expert <= 16:
        return 16
    return 64 if rows_an_expert <= 96 else 128


def invariant_tile_rows(dtype: torch.dtype) -> int:
    """The rows of every tile, whatever the step: then a token's bits depend on that token alone.

    The rows decide in which order the products along E and F are summed. `choose_tile_rows` goes by
    the step's tokens: fastest, and the only thing about a step that chooses between compiled forms,
    none of which serves less than a doubling of tokens: a warm-up whose steps double up to the
    largest has met them all. 64 is where wgmma begins, so prefills keep it; a
    decode is bound by the bytes of weights, which are the same. float32 supports 16 only."""
    return 16 if dtype == torch.float32 else 64


@triton.jit(do_not_specialize=["max_tiles"])
def grouped_product_kernel(
    a_ptr,  # [rows, K], rows `a_stride` apart; pair p reads row p // PAIRS_A_ROW
    w_ptr,  # [X, N, K], or [X, 2N, K] if GATED: gate's outputs, then up's
    bias_ptr,  # [X, N], or [X, 2N]; unused without HAS_BIAS
    out_ptr,  # [P, N]
    sorted_ptr,  # int32 [P]
    tile_expert_ptr,  # int32 [L]
    tile_start_ptr,  # int32 [L]
    tile_stop_ptr,  # int32 [L]
    max_tiles,
    a_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    PAIRS_A_ROW: tl.constexpr,
    GATED: tl.constexpr,
    SQUARED: tl.constexpr,
    CLAMPED: tl.constexpr,
    IS_GELU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_TILES: tl.constexpr,
):
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    tile, expert, n, d = tile_of_program(tile_expert_ptr, max_tiles, NUM_N, GROUP_TILES)
    if expert >= 0:
        pair_M, valid_M = pairs_of_tile(tile, sorted_ptr, tile_start_ptr, tile_stop_ptr, BLOCK_M)
        n_N = n // d * BLOCK_N + tl.arange(0, BLOCK_N)
        k_K = tl.arange(0, BLOCK_K)
        W_ROWS: tl.constexpr = 2 * N if GATED else N
        a_MK = a_ptr + (pair_M // PAIRS_A_ROW)[:, None] * a_stride + k_K[None, :]
        w_KN = w_ptr + expert * (W_ROWS * K) + n_N.to(tl.int64)[None, :] * K + k_K[:, None]
        acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                a = tl.load(a_MK + k, mask=valid_M[:, None], other=0.0)
            else:
                a = tl.load(a_MK + k, mask=valid_M[:, None] & (k_K < K - k)[None, :], other=0.0)
            if K % BLOCK_K == 0 and N % BLOCK_N == 0:
                w = tl.load(w_KN + k)
            else:
                w_mask = (n_N < N)[None, :] & (k_K < K - k)[:, None]
                w = tl.load(w_KN + k, mask=w_mask, other=0.0)
            acc_MN = tl.dot(a, w, acc_MN, input_precision="ieee")
            if GATED:
                if K % BLOCK_K == 0 and N % BLOCK_N == 0:
                    w_up = tl.load(w_KN + (N * K + k))
                else:
                    w_mask = (n_N < N)[None, :] & (k_K < K - k)[:, None]
                    w_up = tl.load(w_KN + (N * K + k), mask=w_mask, other=0.0)
                up_MN = tl.dot(a, w_up, up_MN, input_precision="ieee")
        if HAS_BIAS:
            bias_N = bias_ptr + expert * W_ROWS + n_N
            acc_MN += tl.load(bias_N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up_MN += tl.load(bias_N + N, mask=n_N < N, other=0.0).to(tl.float32)[None, :]
        if GATED:
            acc_MN = gated_expert(acc_MN, up_MN, CLAMPED, IS_GELU)
        if SQUARED:
            acc_MN = tl.maximum(acc_MN, 0.0) * acc_MN  # relu(up)^2
        out_MN = out_ptr + pair_M[:, None] * N + n_N[None, :]
        keep_MN = valid_M[:, None] & (n_N < N)[None, :]
        tl.store(out_MN, acc_MN.to(out_ptr.dtype.element_ty), mask=keep_MN)


@triton.jit
def combine_kernel(
    y_ptr,  # [T, A, E]
    weights_ptr,  # [T, A]
    out_ptr,  # [T, E]
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    sum_E = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        weight = tl.load(weights_ptr + pair).to(tl.float32)
        sum_E += weight * tl.load(y_ptr + pair * E + e_E, mask=e_E < E, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * E + e_E, sum_E.to(out_ptr.dtype.element_ty), mask=e_E < E)


_product_launches = BoundLaunches(grouped_product_kernel)
_combine_launches = BoundLaunches(combine_kernel)


def mixture_of_experts(
    x_TE: torch.Tensor,
    router_logits_TX: torch.Tensor,
    experts: TritonExpertWeights | QuantisedExperts,
    routing: ExpertRouting,
    slot_mapping_T: torch.Tensor | None = None,
    *,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """A sparse feed-forward layer: each token through its `top_k` experts.

        out[t] = sum over ranks a, in order, of weights[t, a] * W_down[x] (silu(g) * u),
        [g | u] = W_gate_up[x] x[t],   x = ids[t, a]         (Shazeer et al., 2017)

    Sums run in float32; `silu(g) * u`, each expert's output and the result are rounded to the dtype
    of x. Six launches (eight where float8 rounds activations) on grids that follow from shapes:
    safe in a CUDA graph. See the module's docstring for what does not depend on the batch. Returns
    out_TE, new.

    Args:
        x_TE: float32, float16 or bfloat16; the last dimension contiguous.
        router_logits_TX, routing, slot_mapping_T: see `moe_routing.route`. Rows of padding are
            whatever memory held.
        tile_rows: 16, 64 or 128; None chooses by `choose_tile_rows`.
    """
    num_tokens, num_experts, top_k = x_TE.shape[0], experts.num_experts, routing.top_k
    if tuple(router_logits_TX.shape) != (num_tokens, num_experts):
        raise ValueError(
            f"router logits are {tuple(router_logits_TX.shape)}; "
            f"give {(num_tokens, num_experts)}, tokens by experts"
        )
    if tile_rows is None:
        tile_rows = choose_tile_rows(num_tokens, top_k, num_experts, x_TE.dtype)
    ids_TA, weights_TA = route(router_logits_TX, routing, slot_mapping_T)
    tiles = build_expert_tiles(ids_TA, num_experts, tile_rows)
    h_PF = experts.multiply_gate_up(x_TE, tiles, top_k)
    y_PE = experts.multiply_down(h_PF, tiles)
    return combine_experts(y_PE, weights_TA)


def grouped_linear(
    a_RK: torch.Tensor,
    w_XNK: torch.Tensor,
    tiles: ExpertTiles,
    *,
    pairs_a_row: int = 1,
    activation: ExpertActivation | None = None,
    bias_XN: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each pair's row times its expert's weights: `out[p] = W[expert of p] a[p // pairs_a_row]`.

    With silu, W holds gate's and up's outputs and `out = silu(gate) * up`, half as wide, with
    gelu_tanh GELU's; with relu2 `out` is relu(out)^2.
    Returns out_PN in the dtype of a, in the order of pairs.

    Args:
        a_RK: [R, K], the last dimension contiguous; R * pairs_a_row is the number of pairs.
        w_XNK: as in `TritonExpertWeights`.
        tiles: of all pairs; `tile_rows` 16, 64 or 128.
    """
    shape, device = (a_RK.shape[0], w_XNK.shape[2]), a_RK.device
    check_tensor("activations", a_RK, shape, FLOATS, device, contiguous_dims=1)
    check_tensor("expert weights", w_XNK, w_XNK.shape, a_RK.dtype, device)
    if tiles.tile_rows not in (16, 64, 128):
        raise ValueError(f"tile_rows is {tiles.tile_rows}; give 16, 64 or 128")
    if bias_XN is not None:
        check_tensor("biases", bias_XN, w_XNK.shape[:2], a_RK.dtype, device)
    num_pairs, gated = check_pairs(a_RK, pairs_a_row, tiles), activation in GATED
    num_outputs = w_XNK.shape[1] // 2 if gated else w_XNK.shape[1]
    out_PN = torch.empty(num_pairs, num_outputs, dtype=a_RK.dtype, device=a_RK.device)
    max_tiles = tiles.tile_expert_L.numel()
    if max_tiles:
        constants, launch = configuration(tiles.tile_rows, a_RK.dtype, gated)
        num_programs = max_tiles * triton.cdiv(num_outputs, constants["BLOCK_N"])
        constants |= launch | {
            "N": num_outputs,
            "K": a_RK.shape[1],
            "PAIRS_A_ROW": pairs_a_row,
            "GATED": gated,
            "SQUARED": activation == "relu2",
            "CLAMPED": activation == "swiglu_oai",
            "IS_GELU": activation == "gelu_tanh",
            "HAS_BIAS": bias_XN is not None,
        }
        of_tiles = tiles.sorted_pairs_P, tiles.tile_expert_L, tiles.tile_start_L, tiles.tile_stop_L
        _product_launches(
            (a_RK, w_XNK, bias_XN, out_PN, *of_tiles),
            (activation, tiles.tile_rows, pairs_a_row),
            lambda: Launch((num_programs,), (max_tiles, a_RK.stride(0)), constants),
        )
    return out_PN


def combine_experts(y_PE: torch.Tensor, weights_TA: torch.Tensor) -> torch.Tensor:
    """`out[t] = sum over a, in order, of weights[t, a] * y[t * A + a]`, in float32."""
    num_tokens, top_k = weights_TA.shape
    shape, device = (num_tokens * top_k, y_PE.shape[-1]), y_PE.device
    check_tensor("y_PE", y_PE, shape, FLOATS, device)
    check_tensor("weights_TA", weights_TA, weights_TA.shape, FLOATS, device)
    width = y_PE.shape[1]
    out_TE = torch.empty(num_tokens, width, dtype=y_PE.dtype, device=y_PE.device)
    if num_tokens:
        grid = num_tokens, triton.cdiv(width, COMBINED_AT_ONCE)
        constants = {"E": width, "TOP_K": top_k, "BLOCK_E": COMBINED_AT_ONCE, "num_warps": 4}
        _combine_launches((y_PE, weights_TA, out_TE), None, lambda: Launch(grid, (), constants))
    return out_TE


def configuration(
    tile_rows: int, dtype: torch.dtype, gated: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options): functions of the rows of a tile and the dtype alone, so that
    bits do not depend on the step."""
    wide = 64 if gated else 128
    if dtype == torch.float32:
        tile = (16 if tile_rows == 128 else 32, 32, 8, 4 if tile_rows == 16 else 8, 2)
    elif tile_rows == 16:
        tile = (wide // 2, 128, 1, 4, 4)
    else:
        tile = (wide, 64, 4, 4, 4) if tile_rows == 64 else (wide, 64, 8, 8, 3)
    block_n, block_k, group_tiles, num_warps, num_stages = tile
    constants = {"BLOCK_M": tile_rows, "BLOCK_N": block_n, "BLOCK_K": block_k}
    launch = {"num_warps": num_warps, "num_stages": num_stages}
    return constants | {"GROUP_TILES": group_tiles}, launch
