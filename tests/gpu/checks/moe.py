"""Mixture of experts: routing, sorting into tiles, and the whole feed-forward layer."""

import torch
import torch.nn.functional as F

from kernels.interface.weights import ExpertRouting
from kernels.torch.linear import choose_experts
from kernels.triton.linear.expert_routing import (
    build_expert_tiles,
    reference_expert_tiles,
    route,
)
from kernels.triton.linear.experts import (
    TritonExpertWeights,
    choose_tile_rows,
    invariant_tile_rows,
    mixture_of_experts,
)
from tests.gpu.checks.errors import (
    INVARIANT_ROWS,
    num_different,
    num_different_in_batches,
    row_error,
    worst,
)

ROUNDING = 1.5e-2
"""Three roundings to bf16: activation, each expert's output, the sum."""

Shape = tuple[int, int, int, int]
"""experts, top_k, E, F"""
QWEN3_MOE: Shape = (128, 8, 2048, 768)
MIXTRAL: Shape = (8, 2, 4096, 14336)
SMALL: Shape = (8, 2, 256, 192)


def check_routing(num_tokens: int, shape: Shape, *, device: str) -> float:
    """Ids, pairs and tiles exactly; weights within rounding."""
    num_experts, top_k = shape[:2]
    # on a grid: near ties would depend on the exponential's last bit, true ones do not
    logits_TX = torch.randn(num_tokens, num_experts, device=device).mul(64).round().div(64)
    routing = ExpertRouting(top_k=top_k, renormalise=True)
    ids_TA, weights_TA = route(logits_TX, routing)
    expected_ids, expected_weights = choose_experts(logits_TX.cpu(), routing)
    different = num_different(ids_TA.cpu(), expected_ids.int())
    tile_rows = choose_tile_rows(num_tokens, top_k, num_experts, torch.bfloat16)
    ours = build_expert_tiles(ids_TA, num_experts, tile_rows)
    theirs = reference_expert_tiles(ids_TA.cpu(), num_experts, tile_rows)
    needed = theirs.tile_expert_L >= 0
    different += num_different(ours.sorted_pairs_P.cpu(), theirs.sorted_pairs_P)
    different += num_different(ours.tile_expert_L.cpu(), theirs.tile_expert_L)
    for name in ("tile_start_L", "tile_stop_L"):
        mine, expected = getattr(ours, name).cpu(), getattr(theirs, name)
        different += num_different(mine[needed], expected[needed])
    return worst(different, row_error(weights_TA.cpu(), expected_weights))


def check(
    num_tokens: int,
    shape: Shape,
    *,
    tile_rows: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str,
) -> float:
    """The layer against float32 products on the same device, for the kernel's own choice of
    experts (which `check_routing` judges)."""
    x_TE, logits_TX, w_gate_up, w_down = make_inputs(num_tokens, shape, dtype, device)
    top_k = shape[1]
    routing, experts = ExpertRouting(top_k=top_k, renormalise=True), (w_gate_up, w_down)
    out = mixture_of_experts(
        x_TE, logits_TX, TritonExpertWeights(*experts), routing, tile_rows=tile_rows
    )
    ids_TA, weights_TA = route(logits_TX, routing)
    reference = torch.zeros_like(x_TE, dtype=torch.float32)
    for expert in range(shape[0]):
        rows, ranks = (ids_TA == expert).nonzero(as_tuple=True)
        gate, up = (x_TE[rows].float() @ w_gate_up[expert].float().T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w_down[expert].float().T
        reference.index_add_(0, rows, y * weights_TA[rows, ranks, None])
    return row_error(out, reference)


def check_same_bits(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.bfloat16,
    rows: tuple[int, ...] = INVARIANT_ROWS,
    device: str,
) -> float:
    """See `num_different_in_batches`; with `--batch-invariant`."""
    x_TE, logits_TX, *weights = make_inputs(max(rows), shape, dtype, device)
    experts = TritonExpertWeights(*weights)
    routing = ExpertRouting(top_k=shape[1], renormalise=True)
    tile_rows = invariant_tile_rows(dtype)
    return num_different_in_batches(
        lambda some: mixture_of_experts(
            x_TE[some], logits_TX[some], experts, routing, tile_rows=tile_rows
        ),
        rows,
    )


def make_inputs(
    num_tokens: int, shape: Shape, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, ...]:
    num_experts, _, width, features = shape

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    return (
        randn(num_tokens, width),
        torch.randn(num_tokens, num_experts, device=device),
        randn(num_experts, 2 * features, width).mul_(width**-0.5),
        randn(num_experts, width, features).mul_(features**-0.5),
    )
