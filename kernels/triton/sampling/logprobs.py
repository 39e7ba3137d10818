"""Log-probabilities of the sampled and of the likeliest tokens, without a softmax in memory.

Sums go in an order that depends on V alone, so a row's bits do not depend on its batch. Ranks and
choices compare logits, which the rounding of log_softmax can only make equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interface.sampling_rows import MAX_DEVICE_LOGPROBS
from kernels.triton.sampling.columns import SamplingColumns
from kernels.triton.sampling.row_maxima import TILE, num_splits
from kernels.triton.tensor_checks import check_memory, check_tensor

WARPS = 4
_NO_ID = tl.constexpr(0x7FFFFFFF)


def report_logprobs_reference(
    logits_V: torch.Tensor, token_id: int, num_logprobs: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The specification, for one row: ids [1 + n], log-probabilities [1 + n], rank."""
    logprobs_V = logits_V.log_softmax(dim=0)
    order_V = logits_V.sort(descending=True, stable=True).indices[:num_logprobs]
    ids = torch.cat([torch.tensor([token_id]), order_V])
    rank = int((logits_V > logits_V[token_id]).sum()) + 1
    return ids, logprobs_V[ids], rank


@triton.jit
def split_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    tokens_ptr,  # int64 [R]
    num_logprobs_ptr,  # int32 [R]
    best_ptr,  # float32 [R, S], written
    sum_ptr,  # float32 [R, S], written
    above_ptr,  # int32 [R, S], written
    top_ptr,  # float32 [R, S, K], written: the first n of each
    top_id_ptr,  # int32 [R, S, K], likewise
    V,
    S,
    K,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    number = tl.load(num_logprobs_ptr + row)
    if number < 0:
        return
    row_ptr = logits_ptr + row * stride_r
    ids = split * TILE + tl.arange(0, TILE)  # [TILE]
    x = tl.load(row_ptr + ids, ids < V, -float("inf")).to(tl.float32)  # [TILE]
    best = tl.max(x, axis=0)
    place = row * S + split
    tl.store(best_ptr + place, best)
    share = tl.where(x == -float("inf"), 0.0, tl.exp(x - best))
    tl.store(sum_ptr + place, tl.sum(share, axis=0))
    chosen = tl.load(row_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    tl.store(above_ptr + place, tl.sum((x > chosen).to(tl.int32), axis=0))
    left = tl.where(ids < V, ids, _NO_ID)  # [TILE], ids not taken yet
    for index in range(tl.minimum(number, K)):
        value = tl.max(tl.where(left < _NO_ID, x, -float("inf")), axis=0)
        taken = tl.min(tl.where(x == value, left, _NO_ID), axis=0)
        tl.store(top_ptr + place * K + index, value)
        tl.store(top_id_ptr + place * K + index, taken)
        left = tl.where(ids == taken, _NO_ID, left)


@triton.jit
def merge_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    tokens_ptr,  # int64 [R]
    num_logprobs_ptr,  # int32 [R]
    best_ptr,  # float32 [R, S]
    sum_ptr,  # float32 [R, S]
    above_ptr,  # int32 [R, S]
    top_ptr,  # float32 [R, S, K]
    top_id_ptr,  # int32 [R, S, K]
    out_ids_ptr,  # int32 [R, 1 + K], written
    out_ptr,  # float32 [R, 1 + K], written
    rank_ptr,  # int32 [R], written
    S,
    K,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    number = tl.load(num_logprobs_ptr + row)
    if number < 0:
        return
    splits = tl.arange(0, SPLITS)  # [SPLITS]
    is_split = splits < S
    place = row * S + splits
    bests = tl.load(best_ptr + place, is_split, -float("inf"))
    sums = tl.load(sum_ptr + place, is_split, 0.0)
    best = tl.max(bests, axis=0)
    scale = tl.where(bests == -float("inf"), 0.0, tl.exp(bests - best))
    log_total = tl.log(tl.sum(sums * scale, axis=0))
    token = tl.load(tokens_ptr + row)
    chosen = tl.load(logits_ptr + row * stride_r + token).to(tl.float32)
    out_ids_ptr += row * (K + 1)
    out_ptr += row * (K + 1)
    tl.store(out_ids_ptr, token.to(tl.int32))
    tl.store(out_ptr, (chosen - best) - log_total)
    above = tl.load(above_ptr + place, is_split, 0)
    tl.store(rank_ptr + row, tl.sum(above, axis=0) + 1)
    heads = tl.zeros([SPLITS], tl.int32)  # how many of each split's list are merged
    for index in range(tl.minimum(number, K)):
        candidate = place * K + heads
        values = tl.load(top_ptr + candidate, is_split, -float("inf"))
        ids = tl.load(top_id_ptr + candidate, is_split, _NO_ID)
        value = tl.max(tl.where(ids < _NO_ID, values, -float("inf")), axis=0)
        taken = tl.min(tl.where(values == value, ids, _NO_ID), axis=0)
        tl.store(out_ids_ptr + 1 + index, taken)
        tl.store(out_ptr + 1 + index, (value - best) - log_total)
        heads += (splits == taken // TILE).to(tl.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsMemory:
    """What `report_logprobs` writes on its way, for up to so many rows, V and K."""

    best_RS: torch.Tensor
    sum_RS: torch.Tensor
    above_RS: torch.Tensor
    top_RSK: torch.Tensor
    top_id_RSK: torch.Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, max_logprobs: int, device: torch.device
    ) -> LogprobsMemory:
        """8 bytes a row, split and logprob.
        Raises ValueError: max_logprobs outside [0, MAX_DEVICE_LOGPROBS]."""
        if not 0 <= max_logprobs <= MAX_DEVICE_LOGPROBS:
            raise ValueError(
                f"max_logprobs is {max_logprobs}, it must be in [0, {MAX_DEVICE_LOGPROBS}]; "
                "report more on the host"
            )
        shape = (num_rows, num_splits(vocab_size))
        top = (*shape, max_logprobs)
        return cls(
            best_RS=torch.empty(shape, dtype=torch.float32, device=device),
            sum_RS=torch.empty(shape, dtype=torch.float32, device=device),
            above_RS=torch.empty(shape, dtype=torch.int32, device=device),
            top_RSK=torch.empty(top, dtype=torch.float32, device=device),
            top_id_RSK=torch.empty(top, dtype=torch.int32, device=device),
        )


def report_logprobs(
    logits_RV: torch.Tensor,
    token_ids_R: torch.Tensor,
    columns: SamplingColumns,
    *,
    memory: LogprobsMemory,
    out_ids_RN: torch.Tensor,
    out_logprobs_RN: torch.Tensor,
    out_ranks_R: torch.Tensor,
) -> None:
    """`log_softmax(logits)` of each row's token, then of its n likeliest; the token's rank.

    Equal to torch.log_softmax and topk within 1e-5; equal logits stand by rising id. The rank is 1
    and the number of logits above the token's.

    Args:
        logits_RV: floating, rows contiguous. Not changed.
        token_ids_R: int64, each in [0, V).
        columns: n of each row is its `num_logprobs`, at most K.
        memory: for at least R rows, this vocabulary and K; written.
        out_ids_RN: int32 [R, 1 + K], out_logprobs_RN: float32 likewise; the first 1 + n of a row
            are written.
        out_ranks_R: int32, written.
    """
    rows, vocab_size = columns.check_logits(logits_RV)
    device = logits_RV.device
    splits = num_splits(vocab_size)
    width = memory.top_RSK.shape[2]
    check_tensor("token_ids", token_ids_R, (rows,), torch.int64, device)
    check_tensor("out_ids", out_ids_RN, (rows, 1 + width), torch.int32, device)
    check_tensor("out_logprobs", out_logprobs_RN, (rows, 1 + width), torch.float32, device)
    check_tensor("out_ranks", out_ranks_R, (rows,), torch.int32, device)
    check_memory(memory.best_RS, rows, splits)
    if not rows:
        return
    asked = (
        logits_RV,
        logits_RV.stride(0),
        columns.num_rows_1,
        token_ids_R,
        columns.num_logprobs_N,
    )
    parts = (memory.best_RS, memory.sum_RS, memory.above_RS, memory.top_RSK, memory.top_id_RSK)
    split_kernel[(splits, rows)](
        *asked, *parts, vocab_size, splits, width, TILE=TILE, num_warps=WARPS
    )
    merge_kernel[(rows,)](
        *asked,
        *parts,
        out_ids_RN,
        out_logprobs_RN,
        out_ranks_R,
        splits,
        width,
        SPLITS=triton.next_power_of_2(splits),
        TILE=TILE,
        num_warps=1,
    )
