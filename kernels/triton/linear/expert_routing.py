"""Mixture of experts: which experts a token goes to, and the order in which they are computed.

Shape suffixes here: P pairs of (token, chosen expert), numbered `token * top_k + rank`; A chosen
experts a token (top_k); L tiles."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interface.weights import ExpertRouting
from kernels.triton.tensor_checks import check_tensor

_MOST_EXPERTS = 1024
_ROUTED_AT_ONCE = 512
PAIRS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """The work of one layer, in tiles of up to `tile_rows` pairs of one expert.

        sorted_pairs_P   | expert 0 ............ | expert 2 .. | expert 3 ...................... |
        tile_expert_L      0        0        0     2             3        3        3         3  -1

    Attributes:
        sorted_pairs_P: int32, numbers of pairs by expert; undefined behind the last that has one.
        tile_expert_L: int32, -1 for tiles that are not needed this time; those come last.
        tile_start_L, tile_stop_L: int32, the half-open range of `sorted_pairs_P` of each tile that
            is needed; undefined for the others.
        tile_rows: most pairs of a tile.
    """

    sorted_pairs_P: torch.Tensor
    tile_expert_L: torch.Tensor
    tile_start_L: torch.Tensor
    tile_stop_L: torch.Tensor
    tile_rows: int


def most_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """The largest number of tiles that any choice of experts can need."""
    return (num_pairs + min(num_experts, num_pairs) * (tile_rows - 1)) // tile_rows


def reference_expert_tiles(
    expert_ids_TA: torch.Tensor, num_experts: int, tile_rows: int
) -> ExpertTiles:
    """What `build_expert_tiles` computes, with 0 where that leaves entries undefined."""
    ids_P = expert_ids_TA.reshape(-1)
    num_left_out = int((ids_P < 0).sum())
    length = most_tiles(ids_P.numel(), num_experts, tile_rows)
    tiles = []
    stop = 0
    for expert, count in enumerate(
        torch.bincount(ids_P[ids_P >= 0], minlength=num_experts).tolist()
    ):
        start, stop = stop, stop + count
        tiles += [
            (expert, first, min(first + tile_rows, stop)) for first in range(start, stop, tile_rows)
        ]
    tiles += [(-1, 0, 0)] * (length - len(tiles))
    columns = torch.tensor(tiles, dtype=torch.int32).reshape(-1, 3).T.contiguous()
    return ExpertTiles(
        sorted_pairs_P=torch.sort(ids_P, stable=True).indices.to(torch.int32).roll(-num_left_out),
        tile_expert_L=columns[0],
        tile_start_L=columns[1],
        tile_stop_L=columns[2],
        tile_rows=tile_rows,
    )


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    logits_ptr,  # [T, X], rows `logits_stride` apart
    slots_ptr,  # int64 [T], read if HAS_SLOTS
    bias_ptr,  # float32 [X], read if HAS_BIAS
    scales_ptr,  # float32 [X], read if HAS_SCALES
    ids_ptr,  # int32 [T, A]
    weights_ptr,  # float [T, A]
    num_tokens,
    logits_stride,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BY_SIGMOID: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    G_PAD: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_OF_GROUP: tl.constexpr,
    EPSILON: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token_T = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    x_X = tl.arange(0, X_PAD)
    k_A = tl.arange(0, K_PAD)
    valid_T = token_T < num_tokens
    logits_TX = tl.load(
        logits_ptr + token_T[:, None] * logits_stride + x_X[None, :],
        mask=valid_T[:, None] & (x_X < X)[None, :],
        other=-float("inf"),
    ).to(tl.float32)
    if BY_SIGMOID:
        score_TX = 1.0 / (1.0 + tl.exp(-logits_TX))
    else:
        # rows past the end hold -inf only; a finite peak keeps them free of NaN
        peak_T = tl.maximum(tl.max(logits_TX, axis=1), -3.0e38)
        weight_TX = tl.exp(logits_TX - peak_T[:, None])
        score_TX = weight_TX / tl.sum(weight_TX, axis=1)[:, None]
    left_TX = score_TX
    if HAS_BIAS:
        left_TX += tl.load(bias_ptr + x_X, mask=x_X < X, other=0.0)[None, :]
    # NaN compares with nothing: as -1e30 it still loses to every real number, and the id stays in
    # range. The products of such a token are NaN anyway. What may not be chosen is less than that.
    left_TX = tl.where(left_TX >= -1.0e30, left_TX, -1.0e30)
    left_TX = tl.where((x_X < X)[None, :], left_TX, -3.0e30)
    if NUM_GROUPS > 1:
        g_G = tl.arange(0, G_PAD)
        group_X = x_X // (X // NUM_GROUPS)
        rank_TG = tl.full((BLOCK_T, G_PAD), -3.0e30, dtype=tl.float32)
        for g in tl.static_range(NUM_GROUPS):
            in_TX = tl.where((group_X == g)[None, :], left_TX, -3.0e30)
            rank_T = tl.max(in_TX, axis=1)
            if BEST_OF_GROUP > 1:
                best_T = tl.min(tl.where(in_TX == rank_T[:, None], x_X[None, :], X_PAD), axis=1)
                in_TX = tl.where(x_X[None, :] == best_T[:, None], -3.0e30, in_TX)
                rank_T += tl.max(in_TX, axis=1)
            rank_TG = tl.where((g_G == g)[None, :], rank_T[:, None], rank_TG)
        kept_TX = (x_X < 0)[None, :] & (token_T >= 0)[:, None]
        for _ in tl.static_range(TOP_GROUPS):
            rank_T = tl.max(rank_TG, axis=1)
            best_T = tl.min(tl.where(rank_TG == rank_T[:, None], g_G[None, :], G_PAD), axis=1)
            kept_TX = kept_TX | (group_X[None, :] == best_T[:, None])
            rank_TG = tl.where(g_G[None, :] == best_T[:, None], -4.0e30, rank_TG)
        left_TX = tl.where(kept_TX, left_TX, -2.0e30)
    ids_TA = tl.zeros((BLOCK_T, K_PAD), dtype=tl.int32)
    weights_TA = tl.zeros((BLOCK_T, K_PAD), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        best_T = tl.max(left_TX, axis=1)
        # the lowest id wins a tie
        id_T = tl.min(tl.where(left_TX == best_T[:, None], x_X[None, :], X_PAD), axis=1)
        ids_TA = tl.where((k_A == k)[None, :], id_T[:, None], ids_TA)
        is_best_TX = x_X[None, :] == id_T[:, None]
        if HAS_BIAS:
            best_T = tl.sum(tl.where(is_best_TX, score_TX, 0.0), axis=1)
        weights_TA = tl.where((k_A == k)[None, :], best_T[:, None], weights_TA)
        left_TX = tl.where(is_best_TX, -2.0e30, left_TX)
    if RENORMALISE:
        weights_TA = weights_TA / (tl.sum(weights_TA, axis=1) + EPSILON)[:, None]
    if HAS_SCALES:
        weights_TA *= tl.load(scales_ptr + ids_TA)
    weights_TA *= SCALE
    if HAS_SLOTS:
        slot_T = tl.load(slots_ptr + token_T, mask=valid_T, other=-1)
        ids_TA = tl.where((slot_T >= 0)[:, None], ids_TA, -1)
    at_TA = token_T[:, None] * TOP_K + k_A[None, :]
    store_TA = valid_T[:, None] & (k_A < TOP_K)[None, :]
    tl.store(ids_ptr + at_TA, ids_TA, mask=store_TA)
    tl.store(weights_ptr + at_TA, weights_TA.to(weights_ptr.dtype.element_ty), mask=store_TA)


@triton.jit(do_not_specialize=["num_pairs"])
def count_pairs_kernel(
    ids_ptr,  # int32 [P]
    counts_ptr,  # int32 [X]
    num_pairs,
    BLOCK_P: tl.constexpr,
):
    """One program an expert: how many pairs it has."""
    expert = tl.program_id(0)
    hits_P = tl.zeros((BLOCK_P,), dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK_P):
        pair_P = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_P)
        id_P = tl.load(ids_ptr + pair_P, mask=pair_P < num_pairs, other=-1)
        hits_P += (id_P == expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(hits_P, axis=0))


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def place_pairs_kernel(
    ids_ptr,  # int32 [P]
    counts_ptr,  # int32 [X]
    sorted_ptr,  # int32 [P]
    tile_expert_ptr,  # int32 [L]
    tile_start_ptr,  # int32 [L]
    tile_stop_ptr,  # int32 [L]
    num_pairs,
    max_tiles,
    X: tl.constexpr,
    X_PAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """One program an expert: its pairs in order, and its tiles. The last one ends the list."""
    expert = tl.program_id(0)
    x_X = tl.arange(0, X_PAD)
    l_L = tl.arange(0, BLOCK_L)
    count_X = tl.load(counts_ptr + x_X, mask=x_X < X, other=0)
    tiles_X = (count_X + TILE_ROWS - 1) // TILE_ROWS
    first_row = tl.sum(tl.where(x_X < expert, count_X, 0), axis=0)
    stop_row = tl.sum(tl.where(x_X <= expert, count_X, 0), axis=0)
    first_tile = tl.sum(tl.where(x_X < expert, tiles_X, 0), axis=0)
    stop_tile = tl.sum(tl.where(x_X <= expert, tiles_X, 0), axis=0)

    for tile in range(first_tile, stop_tile, BLOCK_L):
        tile_L = tl.cast(tile, tl.int64) + l_L
        valid_L = tile_L < stop_tile
        start_L = first_row + (tile_L - first_tile).to(tl.int32) * TILE_ROWS
        tl.store(tile_expert_ptr + tile_L, tl.zeros_like(start_L) + expert, mask=valid_L)
        tl.store(tile_start_ptr + tile_L, start_L, mask=valid_L)
        tl.store(tile_stop_ptr + tile_L, tl.minimum(start_L + TILE_ROWS, stop_row), mask=valid_L)
    if expert == X - 1:
        for tile in range(stop_tile, max_tiles, BLOCK_L):
            tile_L = tl.cast(tile, tl.int64) + l_L
            no_expert_L = tl.full((BLOCK_L,), -1, dtype=tl.int32)
            tl.store(tile_expert_ptr + tile_L, no_expert_L, mask=tile_L < max_tiles)

    if stop_row > first_row:
        row = first_row
        for start in range(0, num_pairs, BLOCK_P):
            pair_P = tl.cast(start, tl.int64) + tl.arange(0, BLOCK_P)
            id_P = tl.load(ids_ptr + pair_P, mask=pair_P < num_pairs, other=-1)
            hit_P = (id_P == expert).to(tl.int32)
            row_P = row + tl.cumsum(hit_P, axis=0) - hit_P
            tl.store(sorted_ptr + row_P, pair_P.to(tl.int32), mask=hit_P == 1)
            row += tl.sum(hit_P, axis=0)


def route(
    router_logits_TX: torch.Tensor,
    routing: ExpertRouting,
    slot_mapping_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token and their weights.

        p = softmax(logits) in float32, or sigmoids;  c = p + bias, of the best groups
        ids = the top_k largest c, falling, lowest id first in a tie
        weights = p[ids], divided by their sum + epsilon if `renormalise`, times scale_X[ids] if
                  given, times scale; then rounded

    Mixtral (Jiang et al., 2024): softmax, renormalise, float32. Qwen3-MoE: renormalise as its
    `norm_topk_prob` says, weights rounded to the dtype of the logits. DeepSeek-V3
    (arXiv:2412.19437): sigmoids, bias, groups. `router_logits_TX`: floating; the last dimension
    contiguous. `slot_mapping_T`: int64; a token with a slot of -1, padding, has -1 as its experts.
    Returns (int32 expert_ids_TA, expert_weights_TA), new tensors."""
    if router_logits_TX.ndim != 2 or router_logits_TX.stride(1) != 1:
        raise ValueError(
            f"router logits have shape {tuple(router_logits_TX.shape)} and strides "
            f"{router_logits_TX.stride()}; give [T, X] with contiguous rows"
        )
    if not router_logits_TX.is_floating_point():
        raise TypeError(f"router logits are {router_logits_TX.dtype}; give a floating dtype")
    num_tokens, num_experts = router_logits_TX.shape
    _check_experts(num_experts)
    routing.check(num_experts)
    device, top_k = router_logits_TX.device, routing.top_k
    bias_X, scale_X = routing.bias_X, routing.scale_X
    for name, numbers_X in (("bias_X", bias_X), ("scale_X", scale_X)):
        if numbers_X is not None:
            check_tensor(name, numbers_X, (num_experts,), torch.float32, device)
    if slot_mapping_T is not None:
        check_tensor("slot_mapping_T", slot_mapping_T, (num_tokens,), torch.int64, device)
    ids_TA = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    weights_TA = torch.empty(num_tokens, top_k, dtype=routing.weights_dtype, device=device)
    if num_tokens:
        constants = route_constants(num_experts, routing, has_slots=slot_mapping_T is not None)
        route_kernel[(triton.cdiv(num_tokens, constants["BLOCK_T"]),)](
            router_logits_TX,
            ids_TA if slot_mapping_T is None else slot_mapping_T,
            weights_TA if bias_X is None else bias_X,
            weights_TA if scale_X is None else scale_X,
            ids_TA,
            weights_TA,
            num_tokens,
            router_logits_TX.stride(0),
            **constants,
            num_warps=4,
        )
    return ids_TA, weights_TA


def build_expert_tiles(
    expert_ids_TA: torch.Tensor, num_experts: int, tile_rows: int
) -> ExpertTiles:
    """Sort pairs by expert and cut them into tiles. Two launches, no host synchronisation.

    Args:
        expert_ids_TA: int32, contiguous, each in [0, num_experts), or -1 for a pair that no expert
            computes: as `route` gives them.
        tile_rows: most pairs of a tile, a power of two.
    """
    ids = expert_ids_TA
    check_tensor("expert_ids_TA", ids, ids.shape, torch.int32, ids.device)
    _check_experts(num_experts)
    if tile_rows < 1 or tile_rows & (tile_rows - 1):
        raise ValueError(f"tile_rows is {tile_rows}; give a power of two")
    num_pairs = expert_ids_TA.numel()
    if num_pairs + num_experts * tile_rows >= 2**31:
        raise ValueError(f"{num_pairs} pairs exceed int32; run fewer tokens a step")
    max_tiles = most_tiles(num_pairs, num_experts, tile_rows)

    def new(length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.int32, device=expert_ids_TA.device)

    tiles = ExpertTiles(
        sorted_pairs_P=new(num_pairs),
        tile_expert_L=new(max_tiles),
        tile_start_L=new(max_tiles),
        tile_stop_L=new(max_tiles),
        tile_rows=tile_rows,
    )
    if num_pairs:
        counts_X = new(num_experts)
        count_pairs_kernel[(num_experts,)](
            expert_ids_TA, counts_X, num_pairs, BLOCK_P=PAIRS_AT_ONCE, num_warps=4
        )
        place_pairs_kernel[(num_experts,)](
            expert_ids_TA,
            counts_X,
            tiles.sorted_pairs_P,
            tiles.tile_expert_L,
            tiles.tile_start_L,
            tiles.tile_stop_L,
            num_pairs,
            max_tiles,
            **place_constants(num_experts, tile_rows),
            num_warps=4,
        )
    return tiles


def _check_experts(num_experts: int) -> None:
    if not 1 <= num_experts <= _MOST_EXPERTS:
        raise ValueError(f"{num_experts} experts; between 1 and {_MOST_EXPERTS} are supported")


def route_constants(
    num_experts: int, routing: ExpertRouting, *, has_slots: bool
) -> dict[str, int | bool | float]:
    x_pad = triton.next_power_of_2(num_experts)
    return {
        "X": num_experts,
        "X_PAD": x_pad,
        "TOP_K": routing.top_k,
        "K_PAD": triton.next_power_of_2(routing.top_k),
        "RENORMALISE": routing.renormalise,
        "BY_SIGMOID": routing.scores == "sigmoid",
        "HAS_BIAS": routing.bias_X is not None,
        "HAS_SCALES": routing.scale_X is not None,
        "NUM_GROUPS": routing.num_groups,
        "G_PAD": triton.next_power_of_2(routing.num_groups),
        "TOP_GROUPS": routing.top_groups,
        "BEST_OF_GROUP": min(routing.best_of_group, num_experts // routing.num_groups),
        "EPSILON": routing.epsilon,
        "SCALE": routing.scale,
        "HAS_SLOTS": has_slots,
        "BLOCK_T": max(1, _ROUTED_AT_ONCE // x_pad),
    }


def place_constants(num_experts: int, tile_rows: int) -> dict[str, int]:
    return {
        "X": num_experts,
        "X_PAD": triton.next_power_of_2(num_experts),
        "TILE_ROWS": tile_rows,
        "BLOCK_P": PAIRS_AT_ONCE,
        "BLOCK_L": 128,
    }


@triton.jit
def tile_of_program(tile_expert_ptr, max_tiles, NUM_N: tl.constexpr, GROUP_TILES: tl.constexpr):
    """(tile, its expert or -1, n, d), of the block n // d of outputs.
    Neighbours share weights, then rows: GROUP_TILES tiles go through all of N together."""
    program = tl.program_id(0)
    first = program // (GROUP_TILES * NUM_N) * GROUP_TILES
    inside = program % (GROUP_TILES * NUM_N)
    tiles_here = tl.minimum(max_tiles - first, GROUP_TILES)
    tile = (first + inside % tiles_here).to(tl.int64)
    return tile, tl.load(tile_expert_ptr + tile).to(tl.int64), inside, tiles_here


@triton.jit
def pairs_of_tile(tile, sorted_ptr, tile_start_ptr, tile_stop_ptr, BLOCK_M: tl.constexpr):
    """(int64 [BLOCK_M] pairs, which of them are there)."""
    row_M = tl.load(tile_start_ptr + tile) + tl.arange(0, BLOCK_M)
    valid_M = row_M < tl.load(tile_stop_ptr + tile)
    return tl.load(sorted_ptr + row_M, mask=valid_M, other=0).to(tl.int64), valid_M


def check_pairs(a_RK: torch.Tensor, pairs_a_row: int, tiles: ExpertTiles) -> int:
    """The number of pairs. Raises ValueError: rows that are not those of the pairs."""
    num_pairs = tiles.sorted_pairs_P.numel()
    if a_RK.shape[0] * pairs_a_row != num_pairs:
        raise ValueError(
            f"{a_RK.shape[0]} rows of {pairs_a_row} pairs, but {num_pairs} were sorted"
        )
    return num_pairs
