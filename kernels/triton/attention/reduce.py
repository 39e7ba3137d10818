"""Joins the results of splits by their log-sum-exp, in a fixed order, in whichever ends last.

Source: "Flash-Decoding" (Dao, Haziza, Massa, Sizov 2023)."""

import triton
import triton.language as tl


@triton.jit
def all_arrived(arrivals_1, count):
    """Whether this program's split was the last of `count`: then all that the others stored may be
    read, and the counter is 0 again."""
    tl.debug_barrier()  # every thread has stored its part before one of them says so
    is_last = tl.atomic_add(arrivals_1, 1, sem="acq_rel", scope="gpu") == count - 1
    if is_last:
        tl.store(arrivals_1, 0)
    return is_last


@triton.jit
def join_splits(
    partial_out,  # float32 [rows, D]
    partial_lse,  # float32 [rows], in units of log2
    first_row,  # of the first split
    step,  # rows from one split to the next
    count,
    valid_M,  # [ROWS]
    head_M,  # query heads
    token_M,  # int64
    sinks_H,  # float32 [H], read if HAS_SINKS
    out_THD,  # [T, H, D], written
    out_token_stride,
    out_head_stride,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """`out = sum_p exp(lse_p - lse) out_p`, `lse = log(sum_p exp(lse_p) + exp(sink))`."""
    row_M = first_row + tl.arange(0, ROWS)
    split_P = tl.arange(0, SPLITS_PAD)
    # past the L1 cache: other programs wrote it while this one ran
    lse_PM = tl.load(
        partial_lse + split_P.to(tl.int64)[:, None] * step + row_M[None, :],
        mask=(split_P < count)[:, None] & valid_M[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    peak_M = tl.max(lse_PM, axis=0)
    if HAS_SINKS:
        sink_M = tl.load(sinks_H + head_M, mask=valid_M, other=0.0).to(tl.float32)
        sink_M = sink_M * 1.4426950408889634
        peak_M = tl.maximum(peak_M, sink_M)
    peak_M = tl.where(peak_M == float("-inf"), 0.0, peak_M)
    total_M = tl.sum(tl.exp2(lse_PM - peak_M[None, :]), axis=0)
    if HAS_SINKS:
        total_M += tl.exp2(sink_M - peak_M)
    factor_M = 1.0 / tl.where(total_M > 0.0, total_M, 1.0)
    out_M = out_THD + token_M * out_token_stride + head_M * out_head_stride
    for column in tl.static_range(0, D_PAD, BLOCK_D):
        d_D = column + tl.arange(0, BLOCK_D)
        acc_MD = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
        for chunk in range(0, count, BLOCK_P):
            for offset in tl.static_range(BLOCK_P):  # these loads are under way together
                at_M = row_M + tl.cast(chunk + offset, tl.int64) * step
                mask_M = valid_M & (tl.full([ROWS], offset, tl.int32) + chunk < count)
                part_lse_M = tl.load(
                    partial_lse + at_M, mask=mask_M, other=float("-inf"), cache_modifier=".cg"
                )
                part_MD = tl.load(
                    partial_out + (at_M * D)[:, None] + d_D[None, :],
                    mask=mask_M[:, None] & (d_D < D)[None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                acc_MD += part_MD * tl.exp2(part_lse_M - peak_M)[:, None]
        tl.store(
            out_M[:, None] + d_D[None, :],
            (acc_MD * factor_M[:, None]).to(out_THD.dtype.element_ty),
            mask=valid_M[:, None] & (d_D < D)[None, :],
        )
