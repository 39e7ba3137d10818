"""One token for each row of a mixed batch: greedy, free and truncated rows in the same launches.

The Gumbel-max trick (Gumbel 1954; arXiv:1411.0030): the argmax of scaled logits + noise falls on a
token with its softmax probability. The noise is a function of (seed, position, token)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.torch.sampling import sample_from_all
from kernels.triton.sampling.columns import SamplingColumns
from kernels.triton.sampling.philox import gumbel_noise
from kernels.triton.sampling.row_maxima import (
    TILE,
    find_split_maxima,
    is_finite,
    num_splits,
    row_best,
    row_best_id,
)
from kernels.triton.sampling.truncation import find_thresholds, truncate_reference
from kernels.triton.sampling.truncation_measure import Truncation
from kernels.triton.tensor_checks import check_memory, check_tensor

WARPS = 4


def sample_reference(
    logits_RV: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    *,
    is_greedy_R: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """The specification: int64 [R], for rows with a finite best logit."""
    divisor_R = torch.where(is_greedy_R, 1.0, temperature_R)
    kept_RV = truncate_reference(logits_RV, divisor_R, top_k_R, top_p_R, min_p_R)
    drawn_R = sample_from_all(kept_RV, seeds_R, positions_R)
    return torch.where(is_greedy_R, logits_RV.argmax(dim=1), drawn_R)


@triton.jit
def noisy_maxima_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    is_greedy_ptr,  # bool [R]
    temperature_ptr,  # float32 [R]
    best_ptr,  # float32 [R, S]
    threshold_ptr,  # float32 [R], if TRUNCATES
    last_tie_ptr,  # int32 [R], if TRUNCATES
    noisy_ptr,  # float32 [R, S], written
    noisy_id_ptr,  # int32 [R, S], written
    V,
    S,
    TRUNCATES: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    if tl.load(is_greedy_ptr + row):
        return
    raw_best = row_best(best_ptr, row, S, SPLITS)
    if not is_finite(raw_best):
        return
    temperature = tl.load(temperature_ptr + row)
    best = tl.div_rn(raw_best, temperature)
    first = split * TILE
    if TRUNCATES:
        threshold = tl.load(threshold_ptr + row)
        if tl.div_rn(tl.load(best_ptr + row * S + split), temperature) < threshold:
            tl.store(noisy_ptr + row * S + split, -float("inf"))
            tl.store(noisy_id_ptr + row * S + split, first)
            return
    ids = first + tl.arange(0, TILE)  # [TILE]
    logits = tl.load(logits_ptr + row * stride_r + ids, ids < V, -float("inf"))
    x = tl.div_rn(logits.to(tl.float32), temperature)  # [TILE]
    if TRUNCATES:
        last_tie = tl.load(last_tie_ptr + row)
        is_kept = (x > threshold) | ((x == threshold) & (ids <= last_tie))
        x = tl.where(is_kept, x, -float("inf"))
    noise = gumbel_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), first, TILE)
    noisy = (x - best) + noise  # [TILE]
    noisy_best = tl.max(noisy, axis=0)
    tl.store(noisy_ptr + row * S + split, noisy_best)
    tl.store(noisy_id_ptr + row * S + split, tl.min(tl.where(noisy == noisy_best, ids, V), axis=0))


@triton.jit
def choose_kernel(
    num_rows_ptr,  # int32 [1]
    is_greedy_ptr,  # bool [R]
    best_ptr,  # float32 [R, S]
    best_id_ptr,  # int32 [R, S]
    noisy_ptr,  # float32 [R, S]
    noisy_id_ptr,  # int32 [R, S]
    out_ptr,  # int64 [R], written
    best_logit_ptr,  # float32 [R], written
    S,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    best, chosen = row_best_id(best_ptr, best_id_ptr, row, S, SPLITS)
    if is_finite(best) and not tl.load(is_greedy_ptr + row):
        noisy, chosen = row_best_id(noisy_ptr, noisy_id_ptr, row, S, SPLITS)
        if not is_finite(noisy):  # logit / temperature is infinite
            best = float("inf")
    if not is_finite(best):
        chosen = tl.cast(0, tl.int32)
    tl.store(best_logit_ptr + row, best)
    tl.store(out_ptr + row, chosen.to(tl.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMemory:
    """What `sample` writes on its way, for buckets of up to so many rows of one vocabulary.

    Reused from step to step: allocate it once, before a graph is captured."""

    best_RS: torch.Tensor
    best_id_RS: torch.Tensor
    noisy_RS: torch.Tensor
    noisy_id_RS: torch.Tensor
    truncation: Truncation

    @classmethod
    def allocate(cls, num_rows: int, vocab_size: int, device: torch.device) -> SamplingMemory:
        """About 20 KiB a row."""
        shape = (num_rows, num_splits(vocab_size))
        return cls(
            best_RS=torch.empty(shape, dtype=torch.float32, device=device),
            best_id_RS=torch.empty(shape, dtype=torch.int32, device=device),
            noisy_RS=torch.empty(shape, dtype=torch.float32, device=device),
            noisy_id_RS=torch.empty(shape, dtype=torch.int32, device=device),
            truncation=Truncation.allocate(num_rows, device),
        )


def sample(
    logits_RV: torch.Tensor,
    columns: SamplingColumns,
    *,
    memory: SamplingMemory,
    out_R: torch.Tensor,
    best_logit_R: torch.Tensor,
    any_truncated: bool = True,
) -> None:
    """`argmax((logits / temperature - max) + noise)` over what min_p, top_k and top_p leave.

    Greedy rows take the lowest id of the largest logit. Which kernels run depends on
    `any_truncated` alone, so that a graph holds for every mix of rows; without it three launches,
    with it seven and a memset.

    The tokens are those of `kernels.torch.sampling` but for near ties: a device's logarithms
    differ from the CPU's in the last bit, so noise differs by about 2e-7 of its size (at most
    16.7: 2e-6), and the token changes only where the two best sums lie nearer than that: about once
    in 10**6 draws. Where p cuts is said in `truncation`. Equal sums go to the lowest id.

    Args:
        logits_RV: floating, rows contiguous; -inf is an impossible token. Not changed.
        memory: for at least R rows and this vocabulary; written.
        out_R: int64, written. 0 where the best logit is not finite.
        best_logit_R: float32, written: the largest logit. +inf tells of NaN or +inf in the row,
            also by its temperature, -inf that no token is possible: such rows have failed.
        any_truncated: False only if no row has a limit.
    """
    rows, vocab_size = columns.check_logits(logits_RV)
    device = logits_RV.device
    splits = num_splits(vocab_size)
    check_tensor("out", out_R, (rows,), torch.int64, device)
    check_tensor("best_logit", best_logit_R, (rows,), torch.float32, device)
    check_memory(memory.best_RS, rows, splits)
    if not rows:
        return
    best_RS, best_id_RS = memory.best_RS[:rows], memory.best_id_RS[:rows]
    num_rows_1, is_greedy_R = columns.num_rows_1, columns.is_greedy_N
    find_split_maxima(logits_RV, num_rows_1=num_rows_1, best_RS=best_RS, best_id_RS=best_id_RS)
    if any_truncated:
        find_thresholds(logits_RV, columns, best_RS=best_RS, truncation=memory.truncation)
    padded = triton.next_power_of_2(splits)
    noisy_maxima_kernel[(splits, rows)](
        logits_RV,
        logits_RV.stride(0),
        num_rows_1,
        columns.seeds_N,
        columns.positions_N,
        is_greedy_R,
        columns.temperature_N,
        best_RS,
        memory.truncation.threshold_R,
        memory.truncation.last_tie_R,
        memory.noisy_RS,
        memory.noisy_id_RS,
        vocab_size,
        splits,
        TRUNCATES=any_truncated,
        SPLITS=padded,
        TILE=TILE,
        num_warps=WARPS,
    )
    choose_kernel[(rows,)](
        num_rows_1,
        is_greedy_R,
        best_RS,
        best_id_RS,
        memory.noisy_RS,
        memory.noisy_id_RS,
        out_R,
        best_logit_R,
        splits,
        SPLITS=padded,
        num_warps=1,
    )
