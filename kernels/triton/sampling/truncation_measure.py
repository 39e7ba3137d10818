"""How much of a row lies at or above a value, and where that reaches a target: device functions.

A measure is a count of tokens or a sum of weights exp(x - best), each rounded to 2**-43: int64
either way, hence exact and the same in any order, in all kernels of `truncation`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NUM_PIVOTS = 16
"""Values at which a round of the search measures a row."""

NUM_ROUNDS = 3
"""The last one only for rows whose candidates are too many for the list."""

LIST_SIZE = 4096
"""Candidates that the last search reads from a list; more, and it reads the whole row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Memory of `find_thresholds` for a bucket of rows, and its result. Reused from step to step.

    Attributes:
        threshold_R: float32, of the logits divided by their temperature.
        last_tie_R: int32. Kept are x > threshold, and x == threshold with an id up to this.
        The others are private to `find_thresholds`.
    """

    threshold_R: torch.Tensor
    last_tie_R: torch.Tensor
    pivots_R3P: torch.Tensor
    sums_RN: torch.Tensor
    high_R: torch.Tensor
    above_R: torch.Tensor
    target_R: torch.Tensor
    bounds_R2: torch.Tensor
    bound_above_R: torch.Tensor
    list_RC: torch.Tensor

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device) -> Truncation:
        """Buffers for buckets of up to so many rows."""

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            threshold_R=empty(num_rows, dtype=torch.float32),
            last_tie_R=empty(num_rows, dtype=torch.int32),
            pivots_R3P=empty(num_rows, NUM_ROUNDS, NUM_PIVOTS, dtype=torch.float32),
            sums_RN=empty(num_rows, NUM_ROUNDS * NUM_PIVOTS + 2, dtype=torch.int64),
            high_R=empty(num_rows, dtype=torch.float32),
            above_R=empty(num_rows, dtype=torch.int64),
            target_R=empty(num_rows, dtype=torch.int64),
            bounds_R2=empty(num_rows, 2, dtype=torch.float32),
            bound_above_R=empty(num_rows, dtype=torch.int64),
            list_RC=empty(num_rows, LIST_SIZE, dtype=torch.float32),
        )


_PIVOTS = tl.constexpr(NUM_PIVOTS)


@triton.jit
def ordered(value):
    """float32 as an integer of the same order, int64, one for both zeros; NaN aside."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def unordered(order):
    """The float32 of such an integer."""
    bits = order.to(tl.int32)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def lowest_by_min_p(best, min_p):
    """The smallest float32 at or above `best + log(min_p)` in float64; -inf without a limit."""
    lowest = tl.cast(-float("inf"), tl.float32)
    if min_p > 0:
        exact = best.to(tl.float64) + tl.log(min_p.to(tl.float64))
        rounded = exact.to(tl.float32)
        above = unordered(ordered(rounded) + 1)
        lowest = tl.where(rounded.to(tl.float64) < exact, above, rounded)
    return lowest


@triton.jit
def weights(x, best, FLOAT64: tl.constexpr):
    """exp(x - best) in units of 2**-43, int64; from float32 within 1e-6 of itself where it counts:
    a weight of exp(-d) errs by about (d + 4) * 2**-24."""
    weight = tl.exp(x.to(tl.float64) - best.to(tl.float64)) if FLOAT64 else tl.exp(x - best)
    return (weight * 8796093022208.0 + 0.5).to(tl.int64)


@triton.jit
def worth(x, best, by_mass, FLOAT64: tl.constexpr):
    """The part of each token in the measure, int64 like x."""
    if by_mass:  # noqa: SIM108 - a branch, so that counting rows skip the exponential
        added = weights(x, best, FLOAT64)
    else:
        added = (x == x).to(tl.int64)
    return added


@triton.jit
def share(total, top_p):
    """The least whole measure at or above top_p of a total, at least 1."""
    return tl.maximum(tl.ceil(total.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def narrow(pivots_ptr, sums_ptr, target, high, above):
    """Between which pivots the threshold lies -> (low, high, measure at and above high)."""
    index = tl.arange(0, _PIVOTS)
    pivots = tl.load(pivots_ptr + index)  # [PIVOTS]
    measures = tl.load(sums_ptr + index)  # [PIVOTS]
    enough = measures >= target
    low = tl.max(tl.where(enough, pivots, -float("inf")), axis=0)
    high = tl.minimum(high, tl.min(tl.where(enough, float("inf"), pivots), axis=0))
    above = tl.maximum(above, tl.max(tl.where(enough, 0, measures), axis=0))
    return low, high, above


@triton.jit
def candidates(list_ptr, row_ptr, fits, length, temperature, index):
    """Logits over the temperature, float32 like index: of a list that holds them, or of a row."""
    if fits:
        x = tl.load(list_ptr + index, index < length, -float("inf"))
    else:
        logits = tl.load(row_ptr + index, index < length, -float("inf"))
        x = tl.div_rn(logits.to(tl.float32), temperature)
    return x


@triton.jit
def measure(
    list_ptr,
    row_ptr,
    fits,
    length,
    temperature,
    best,
    bound,
    high,
    by_mass,
    FLOAT64: tl.constexpr,
    TILE: tl.constexpr,
):
    """Measure of the candidates in [bound, high), int64."""
    total = tl.cast(0, tl.int64)
    for start in range(0, length, TILE):
        index = start + tl.arange(0, TILE)  # [TILE]
        x = candidates(list_ptr, row_ptr, fits, length, temperature, index)
        wanted = (index < length) & (x >= bound) & (x < high)
        total += tl.sum(tl.where(wanted, worth(x, best, by_mass, FLOAT64), 0), axis=0)
    return total


@triton.jit
def search(
    list_ptr,
    row_ptr,
    fits,
    length,
    temperature,
    best,
    low,
    high,
    above,
    target,
    by_mass,
    FLOAT64: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The largest t with `above + measure([t, high)) >= target`; low has enough, high has not. Each
    reading of the source measures at 16 values: 8 readings tell all float32 apart."""
    enough = ordered(low)
    short = ordered(high)
    part = tl.arange(0, _PIVOTS) + 1  # [PIVOTS]
    while short - enough > 1:
        middles = enough + (short - enough) * part // (_PIVOTS + 1)
        pivots = unordered(middles)
        sums = tl.zeros([CHUNK, _PIVOTS], tl.int64)
        for start in range(0, length, CHUNK):
            index = start + tl.arange(0, CHUNK)  # [CHUNK]
            x = candidates(list_ptr, row_ptr, fits, length, temperature, index)
            inside = (index < length) & (x < high)
            value = tl.where(inside, worth(x, best, by_mass, FLOAT64), 0)
            sums += tl.where(x[:, None] >= pivots[None, :], value[:, None], 0)
        is_enough = above + tl.sum(sums, axis=0) >= target
        enough = tl.maximum(enough, tl.max(tl.where(is_enough, middles, enough), axis=0))
        short = tl.minimum(short, tl.min(tl.where(is_enough, short, middles), axis=0))
    return unordered(enough)
