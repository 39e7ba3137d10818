"""The best logit of each split of each row: what every later step of sampling begins with.

A split of TILE tokens is a program, so that one row fills a GPU too. Maxima are exact in any order.
"""

import torch
import triton
import triton.language as tl

from kernels.triton.tensor_checks import check_logits, check_tensor

TILE = 2048
"""Tokens of a split: 16 a thread."""


def num_splits(vocab_size: int) -> int:
    """Splits of a row; a function of the vocabulary alone."""
    return -(-vocab_size // TILE)


def find_split_maxima_reference(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The specification, for logits without NaN: maxima [R, S] and their lowest ids [R, S]."""
    best = [tile.max(dim=1).values for tile in logits_RV.split(TILE, dim=1)]
    ids = [
        start * TILE + (tile == tile.amax(dim=1, keepdim=True)).int().argmax(dim=1)
        for start, tile in enumerate(logits_RV.split(TILE, dim=1))
    ]
    return torch.stack(best, dim=1), torch.stack(ids, dim=1).int()


@triton.jit
def is_finite(value):
    """NaN and infinities compare false."""
    return tl.abs(value) < float("inf")


@triton.jit
def row_best(best_ptr, row, S, SPLITS: tl.constexpr):
    """The best logit of a row from its splits' [R, S]."""
    splits = tl.arange(0, SPLITS)  # [SPLITS], the power of two at or above S
    return tl.max(tl.load(best_ptr + row * S + splits, splits < S, -float("inf")), axis=0)


@triton.jit
def row_best_id(best_ptr, best_id_ptr, row, S, SPLITS: tl.constexpr):
    """The best value of a row and the lowest id that has it."""
    splits = tl.arange(0, SPLITS)
    values = tl.load(best_ptr + row * S + splits, splits < S, -float("inf"))  # [SPLITS]
    ids = tl.load(best_id_ptr + row * S + splits, splits < S, 0x7FFFFFFF)  # [SPLITS]
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, 0x7FFFFFFF), axis=0)


@triton.jit
def split_maxima_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    best_ptr,  # float32 [R, S]
    best_id_ptr,  # int32 [R, S]
    V,
    S,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    ids = split * TILE + tl.arange(0, TILE)  # [TILE]
    logits = tl.load(logits_ptr + row * stride_r + ids, ids < V, -float("inf")).to(tl.float32)
    # a maximum passes over NaN: make it what nothing passes over
    logits = tl.where(logits != logits, float("inf"), logits)
    best = tl.max(logits, axis=0)
    tl.store(best_ptr + row * S + split, best)
    tl.store(best_id_ptr + row * S + split, tl.min(tl.where(logits == best, ids, V), axis=0))


def find_split_maxima(
    logits_RV: torch.Tensor,
    *,
    num_rows_1: torch.Tensor,
    best_RS: torch.Tensor,
    best_id_RS: torch.Tensor,
) -> None:
    """`best_RS[r, s] = max(logits[r, s * TILE : (s + 1) * TILE])`, and the lowest id that has it.

    NaN counts as +inf, so that a row with either shows as not finite.

    Args:
        logits_RV: floating, rows contiguous.
        num_rows_1: int32; rows at or beyond it are left as they are.
        best_RS, best_id_RS: float32 and int32 [R, S], S = num_splits(V); written.
    """
    rows, vocab_size = check_logits(logits_RV, num_rows_1)
    splits = num_splits(vocab_size)
    check_tensor("best", best_RS, (rows, splits), torch.float32, logits_RV.device)
    check_tensor("best_id", best_id_RS, (rows, splits), torch.int32, logits_RV.device)
    if rows:
        split_maxima_kernel[(splits, rows)](
            logits_RV,
            logits_RV.stride(0),
            num_rows_1,
            best_RS,
            best_id_RS,
            vocab_size,
            splits,
            TILE=TILE,
            num_warps=4,
        )
