"""Where min_p, top_k and top_p cut each row: a threshold, found without a sort.

Kept is `{x > threshold}` and ties up to some id, for the largest t with `measure({x >= t}) >=
target`: a count for top_k; a sum of weights exp(x - best), in exact int64, for top_p."""

import torch
import triton
import triton.language as tl

from kernels.torch.sampling import truncate_by_sorting
from kernels.triton.device_limits import has_fast_float64
from kernels.triton.sampling.columns import SamplingColumns
from kernels.triton.sampling.row_maxima import TILE, is_finite, num_splits, row_best
from kernels.triton.sampling.truncation_measure import (
    LIST_SIZE,
    NUM_PIVOTS,
    NUM_ROUNDS,
    Truncation,
    lowest_by_min_p,
    measure,
    narrow,
    ordered,
    search,
    share,
    unordered,
    weights,
    worth,
)
from kernels.triton.tensor_checks import check_tensor

_LIST_SIZE = tl.constexpr(LIST_SIZE)
_PIVOTS = tl.constexpr(NUM_PIVOTS)
_SUMS = tl.constexpr(NUM_ROUNDS * NUM_PIVOTS + 2)
_LENGTHS = tl.constexpr(NUM_ROUNDS * NUM_PIVOTS)
"""Among the sums of a row: candidates found after two rounds and after three."""
_CHUNK = tl.constexpr(512)
WARPS = 4
FINISH_WARPS = 8


def truncate_reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
) -> torch.Tensor:
    """The specification: the scaled logits with -inf where nothing is left."""
    return torch.stack(
        [
            truncate_by_sorting(
                logits_V / temperature_R[row],
                top_k=int(top_k_R[row]),
                top_p=float(top_p_R[row]),
                min_p=float(min_p_R[row]),
            )
            for row, logits_V in enumerate(logits_RV)
        ]
    )


@triton.jit
def round_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    is_greedy_ptr,  # bool [R]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    best_ptr,  # float32 [R, S], of the raw logits
    pivots_ptr,  # float32 [R, 3, PIVOTS]
    sums_ptr,  # int64 [R, 3 * PIVOTS + 2], zero at first
    high_ptr,  # float32 [R]
    above_ptr,  # int64 [R]
    target_ptr,  # int64 [R]
    V,
    S,
    ROUND: tl.constexpr,
    FLOAT64: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if tl.load(is_greedy_ptr + row) | ((top_k <= 0) & (top_p >= 1)):
        return
    raw_best = row_best(best_ptr, row, S, SPLITS)
    if not is_finite(raw_best):
        return
    if ROUND == 2 and tl.load(sums_ptr + row * _SUMS + _LENGTHS) <= _LIST_SIZE:
        return
    temperature = tl.load(temperature_ptr + row)
    best = tl.div_rn(raw_best, temperature)
    by_mass = top_k <= 0
    ids = split * TILE + tl.arange(0, TILE)  # [TILE]
    logits = tl.load(logits_ptr + row * stride_r + ids, ids < V, -float("inf"))
    x = tl.div_rn(logits.to(tl.float32), temperature)  # [TILE]
    value = tl.where(ids < V, worth(x, best, by_mass, FLOAT64), 0)  # [TILE]
    sums_ptr += row * _SUMS
    pivots_ptr += row * 3 * _PIVOTS
    if ROUND == 0:
        lowest = lowest_by_min_p(best, tl.load(min_p_ptr + row))
        # top_k counts tokens that min_p drops, too: both limits are thresholds, the higher wins
        lowest = tl.where(by_mass, lowest, -float("inf"))
        low = lowest
        high = best
    else:
        target = tl.minimum(top_k, V)
        if by_mass:
            target = share(tl.load(sums_ptr + _PIVOTS - 1), top_p)
        high = unordered(ordered(best) + 1)
        low, high, above = narrow(pivots_ptr, sums_ptr, target, high, tl.cast(0, tl.int64))
        if ROUND == 2:
            low, high, above = narrow(pivots_ptr + _PIVOTS, sums_ptr + _PIVOTS, target, high, above)
        lowest = low
        if split == 0:
            tl.store(high_ptr + row, high)
            tl.store(above_ptr + row, above)
            tl.store(target_ptr + row, target)
    for index in tl.static_range(_PIVOTS):
        if ROUND == 0:
            # wider and wider apart: the sets grow by about a constant factor. The last takes all.
            if index == _PIVOTS - 1:
                pivot = lowest
            else:
                pivot = tl.maximum(high - 0.125 * (index + 1) * (index + 1), lowest)
        else:
            # evenly over [low, high); with no lower end, twice as far each time
            even = low * (1.0 - index / _PIVOTS) + high * (index / _PIVOTS)
            far = high - 2.0 ** (_PIVOTS + 1 - index)
            pivot = tl.maximum(tl.where(is_finite(low), even, far), lowest)
            if index == 0:
                pivot = low
        reached = tl.sum(tl.where(x >= pivot, value, 0), axis=0)
        if reached > 0:
            tl.atomic_add(sums_ptr + ROUND * _PIVOTS + index, reached, sem="relaxed")
        if split == 0:
            tl.store(pivots_ptr + ROUND * _PIVOTS + index, pivot)


@triton.jit
def gather_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    is_greedy_ptr,  # bool [R]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R]
    top_p_ptr,  # float32 [R]
    best_ptr,  # float32 [R, S]
    pivots_ptr,  # float32 [R, 3, PIVOTS]
    sums_ptr,  # int64 [R, 3 * PIVOTS + 2]
    high_ptr,  # float32 [R]
    above_ptr,  # int64 [R]
    target_ptr,  # int64 [R]
    bounds_ptr,  # float32 [R, 2], written: low, high
    bound_above_ptr,  # int64 [R], written
    list_ptr,  # float32 [R, LIST_SIZE], written in no particular order
    V,
    S,
    ROUND: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    if tl.load(is_greedy_ptr + row) | ((top_k <= 0) & (top_p >= 1)):
        return
    if not is_finite(row_best(best_ptr, row, S, SPLITS)):
        return
    sums_ptr += row * _SUMS
    if ROUND == 2 and tl.load(sums_ptr + _LENGTHS) <= _LIST_SIZE:
        return
    low, high, above = narrow(
        pivots_ptr + (row * 3 + ROUND) * _PIVOTS,
        sums_ptr + ROUND * _PIVOTS,
        tl.load(target_ptr + row),
        tl.load(high_ptr + row),
        tl.load(above_ptr + row),
    )
    if split == 0:
        tl.store(bounds_ptr + row * 2, low)
        tl.store(bounds_ptr + row * 2 + 1, high)
        tl.store(bound_above_ptr + row, above)
    temperature = tl.load(temperature_ptr + row)
    if tl.div_rn(tl.load(best_ptr + row * S + split), temperature) < low:
        return
    ids = split * TILE + tl.arange(0, TILE)  # [TILE]
    logits = tl.load(logits_ptr + row * stride_r + ids, ids < V, -float("inf"))
    x = tl.div_rn(logits.to(tl.float32), temperature)  # [TILE]
    if (top_k > 0) & (top_p < 1):  # top_p goes on among all that top_k leaves
        high = float("inf")
    wanted = (x >= low) & (x < high) & (ids < V)
    number = tl.sum(wanted.to(tl.int32), axis=0)
    if number > 0:
        start = tl.atomic_add(sums_ptr + _LENGTHS + ROUND - 1, number.to(tl.int64), sem="relaxed")
        place = start + tl.cumsum(wanted.to(tl.int32), axis=0) - 1  # [TILE]
        tl.store(list_ptr + row * _LIST_SIZE + place, x, wanted & (place < _LIST_SIZE))


@triton.jit
def finish_kernel(
    logits_ptr,  # floating [R, V]
    stride_r,
    num_rows_ptr,  # int32 [1]
    is_greedy_ptr,  # bool [R]
    temperature_ptr,  # float32 [R]
    top_k_ptr,  # int64 [R]
    top_p_ptr,  # float32 [R]
    min_p_ptr,  # float32 [R]
    best_ptr,  # float32 [R, S]
    sums_ptr,  # int64 [R, 3 * PIVOTS + 2]
    target_ptr,  # int64 [R]
    bounds_ptr,  # float32 [R, 2]
    bound_above_ptr,  # int64 [R]
    list_ptr,  # float32 [R, LIST_SIZE]
    threshold_ptr,  # float32 [R], written
    last_tie_ptr,  # int32 [R], written
    V,
    S,
    FLOAT64: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(num_rows_ptr):
        return
    tl.store(threshold_ptr + row, -float("inf"))
    tl.store(last_tie_ptr + row, V)
    if tl.load(is_greedy_ptr + row):
        return
    raw_best = row_best(best_ptr, row, S, SPLITS)
    if not is_finite(raw_best):
        return
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    best = tl.div_rn(raw_best, temperature)
    threshold = lowest_by_min_p(best, tl.load(min_p_ptr + row))
    if (top_k <= 0) & (top_p >= 1):
        tl.store(threshold_ptr + row, threshold)
        return
    row_ptr = logits_ptr + row * stride_r
    low = tl.load(bounds_ptr + row * 2)
    high = tl.load(bounds_ptr + row * 2 + 1)
    above = tl.load(bound_above_ptr + row)
    target = tl.load(target_ptr + row)
    length = tl.load(sums_ptr + row * _SUMS + _LENGTHS).to(tl.int32)
    if length > _LIST_SIZE:
        length = tl.load(sums_ptr + row * _SUMS + _LENGTHS + 1).to(tl.int32)
    fits = length <= _LIST_SIZE
    list_ptr += row * _LIST_SIZE
    length = tl.where(fits, length, V)
    if top_k > 0:
        kth = search(
            list_ptr, row_ptr, fits, length, temperature, best, low, high, above, target, False,
            FLOAT64, _CHUNK,
        )  # fmt: skip
        threshold = tl.maximum(threshold, kth)
        low = threshold
        high = unordered(ordered(best) + 1)
        above = tl.cast(0, tl.int64)
    if top_p < 1:
        if top_k > 0:
            total = measure(
                list_ptr, row_ptr, fits, length, temperature, best, low, high, True, FLOAT64, TILE
            )
            target = share(total, top_p)
        threshold = search(
            list_ptr, row_ptr, fits, length, temperature, best, low, high, above, target, True,
            FLOAT64, _CHUNK,
        )  # fmt: skip
        # of the tokens equal to the threshold, as many as the target still lacks
        higher = unordered(ordered(threshold) + 1)
        above += measure(
            list_ptr, row_ptr, fits, length, temperature, best, higher, high, True, FLOAT64, TILE
        )
        num_ties = measure(
            list_ptr, row_ptr, fits, length, temperature, best, threshold, higher, False, FLOAT64,
            TILE,
        )  # fmt: skip
        weight = tl.maximum(weights(threshold, best, FLOAT64), 1)
        num_kept = (target - above + weight - 1) // weight
        if num_kept < num_ties:
            before = tl.cast(0, tl.int64)
            last_tie = tl.cast(0, tl.int32)
            for start in range(0, V, TILE):
                ids = start + tl.arange(0, TILE)  # [TILE]
                logits = tl.load(row_ptr + ids, ids < V, -float("inf")).to(tl.float32)
                ties = ((tl.div_rn(logits, temperature) == threshold) & (ids < V)).to(tl.int64)
                place = before + tl.cumsum(ties, axis=0)
                is_last = (ties > 0) & (place == num_kept)
                last_tie = tl.maximum(last_tie, tl.max(tl.where(is_last, ids, 0), axis=0))
                before += tl.sum(ties, axis=0)
            tl.store(last_tie_ptr + row, last_tie)
    tl.store(threshold_ptr + row, threshold)


# maxima   best logit of each split                          (row_maxima.py)
# round 0  measure at 16 pivots below the best    -> an interval [low, high)
# round 1  measure at 16 pivots inside it         -> a narrower one
# gather   its tokens, if they fit, into a list   (rows with both limits: all x >= low)
# round 2, gather     of rows whose tokens did not fit: once more
# finish   search on the ordered bits of float32 over the list; if it still did not fit, the row
def find_thresholds(
    logits_RV: torch.Tensor,
    columns: SamplingColumns,
    *,
    best_RS: torch.Tensor,
    truncation: Truncation,
) -> None:
    """What `truncate_by_sorting(logits / temperature)` keeps, as a threshold a row.

    Tokens that tie with the k-th stay; the token that crosses p stays; among tokens that tie where
    top_p ends the lowest ids stay. Rows that are greedy, without limits or not finite keep all.
    Weights are float64 as on the CPU: cuts differ only where p is within 1e-10 of a token's edge.
    On GPUs with few units for float64 they are float32: within 1e-6 of one.

    Args:
        logits_RV: floating; -inf is an impossible token. Not changed.
        best_RS: of these logits, by `find_split_maxima`.
        truncation: written; has at least R rows.
    """
    rows, vocab_size = columns.check_logits(logits_RV)
    splits = num_splits(vocab_size)
    check_tensor("best", best_RS, (rows, splits), torch.float32, logits_RV.device)
    if truncation.threshold_R.shape[0] < rows:
        raise ValueError(
            f"the truncation has {truncation.threshold_R.shape[0]} rows, the logits have {rows}; "
            "allocate it for the largest bucket"
        )
    if not rows:
        return
    t = truncation
    t.sums_RN[:rows].zero_()
    constants = {"SPLITS": triton.next_power_of_2(splits), "TILE": TILE}
    weighing = {"FLOAT64": has_fast_float64(logits_RV.device)}
    row_arguments = (logits_RV, logits_RV.stride(0), columns.num_rows_1, columns.is_greedy_N)
    limits = (columns.temperature_N, columns.top_k_N, columns.top_p_N)
    measured = (t.pivots_R3P, t.sums_RN, t.high_R, t.above_R, t.target_R)
    bounds = (t.bounds_R2, t.bound_above_R, t.list_RC)
    for round_number in range(NUM_ROUNDS):
        round_kernel[(splits, rows)](
            *row_arguments,
            *limits,
            columns.min_p_N,
            best_RS,
            *measured,
            vocab_size,
            splits,
            ROUND=round_number,
            **constants,
            **weighing,
            num_warps=WARPS,
        )
        if round_number > 0:
            gather_kernel[(splits, rows)](
                *row_arguments,
                *limits,
                best_RS,
                *measured,
                *bounds,
                vocab_size,
                splits,
                ROUND=round_number,
                **constants,
                num_warps=WARPS,
            )
    finish_kernel[(rows,)](
        *row_arguments,
        *limits,
        columns.min_p_N,
        best_RS,
        t.sums_RN,
        t.target_R,
        *bounds,
        t.threshold_R,
        t.last_tie_R,
        vocab_size,
        splits,
        **constants,
        **weighing,
        num_warps=FINISH_WARPS,
    )
