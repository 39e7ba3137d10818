"""Mixture of experts: routing, sorting into tiles, and the whole feed-forward layer."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kernels.triton.moe_linear import choose_tile_rows, fused_moe
from kernels.triton.moe_routing import (
    build_expert_tiles,
    reference_expert_tiles,
    reference_route,
    route,
)
from scripts.gpu.comparison import num_different, row_error, worst
from scripts.gpu.frame import Check, Group, Timing, Work

ROUNDING = 1.5e-2
"""Three roundings to bf16: activation, each expert's output, the sum."""

Shape = tuple[int, int, int, int]
"""experts, top_k, E, F"""
QWEN3_MOE: Shape = (128, 8, 2048, 768)
MIXTRAL: Shape = (8, 2, 4096, 14336)
SMALL: Shape = (8, 2, 256, 192)


def check_routing(num_tokens: int, shape: Shape, *, device: str = "cuda") -> float:
    """Ids, pairs and tiles exactly; weights within rounding."""
    num_experts, top_k = shape[:2]
    # on a grid: near ties would depend on the exponential's last bit, true ones do not
    logits_TX = torch.randn(num_tokens, num_experts, device=device).mul(64).round().div(64)
    ids_TA, weights_TA = route(logits_TX, top_k, renormalise=True)
    expected_ids, expected_weights = reference_route(logits_TX.cpu(), top_k, renormalise=True)
    different = num_different(ids_TA.cpu(), expected_ids)
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
    device: str = "cuda",
) -> float:
    """The layer against float32 products on the same device, for the kernel's own choice of
    experts (which `check_routing` judges)."""
    x_TE, logits_TX, w_gate_up, w_down = _inputs(num_tokens, shape, dtype, device)
    top_k = shape[1]
    out = fused_moe(x_TE, logits_TX, w_gate_up, w_down, top_k, True, tile_rows=tile_rows)
    ids_TA, weights_TA = route(logits_TX, top_k, renormalise=True)
    reference = torch.zeros_like(x_TE, dtype=torch.float32)
    for expert in range(shape[0]):
        rows, ranks = (ids_TA == expert).nonzero(as_tuple=True)
        gate, up = (x_TE[rows].float() @ w_gate_up[expert].float().T).chunk(2, dim=-1)
        y = (F.silu(gate) * up) @ w_down[expert].float().T
        reference.index_add_(0, rows, y * weights_TA[rows, ranks, None])
    return row_error(out, reference)


def prepare(num_tokens: int, shape: Shape, *, device: str = "cuda") -> Work:
    """The layer; at least the weights of all experts that random tokens choose are read."""
    x_TE, logits_TX, w_gate_up, w_down = _inputs(num_tokens, shape, torch.bfloat16, device)
    _, top_k, width, features = shape
    ids_TA, _ = route(logits_TX, top_k, renormalise=True)
    num_used = int((torch.bincount(ids_TA.reshape(-1)) > 0).sum())
    return Work(
        call=lambda: fused_moe(x_TE, logits_TX, w_gate_up, w_down, top_k, True),
        num_bytes=2.0 * (num_used * 3 * width * features + 2 * num_tokens * width),
        num_flops=6.0 * num_tokens * top_k * width * features,
    )


def _inputs(
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


def group() -> Group:
    checks = [
        Check(f"moe routing {name} {rows}", functools.partial(check_routing, rows, shape), 1e-5)
        for name, shape in (("Qwen3-MoE", QWEN3_MOE), ("Mixtral", MIXTRAL))
        for rows in (1, 63, 1000)
    ]
    checks += [
        Check(f"moe layer Qwen3-MoE {rows}", functools.partial(check, rows, QWEN3_MOE), ROUNDING)
        for rows in (1, 63, 1000)
    ]
    checks += [
        Check(
            f"moe layer small tiles of {tile_rows}",
            functools.partial(check, 300, SMALL, tile_rows=tile_rows),
            ROUNDING,
        )
        for tile_rows in (16, 64, 128)
    ]
    timings = tuple(
        Timing(
            f"moe Qwen3-MoE {rows} tokens",
            "moe layer Qwen3-MoE 1000",
            functools.partial(prepare, rows, QWEN3_MOE),
        )
        for rows in (1, 64, 256, 8192)
    )
    return Group("moe", tuple(checks), timings)
