"""Joins the results of a request's splits by their log-sum-exp, in a fixed order.

Source: "Flash-Decoding" (Dao, Haziza, Massa, Sizov 2023)."""

import torch
import triton
import triton.language as tl

from kernels.triton.attention_work import AttentionWork


@triton.jit(do_not_specialize=["capacity", "v_scale"])
def reduce_splits_kernel(
    partial_out,  # float32 [W, K, QUERIES * G, D]
    partial_lse,  # float32 [W, K, QUERIES * G], in units of log2
    query_start_loc_R1,  # int32 [R + 1]
    first_split_R1,  # int32 [num_decodes + 1]
    sinks_H,  # float32 [H], read if HAS_SINKS
    out_THD,  # [T, H, D], written
    lse_TH,  # float32 [T, H], written if HAS_LSE
    capacity,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    v_scale,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """One program a (request, query token) and query head."""
    request = tl.program_id(0) // QUERIES
    query = tl.program_id(0) % QUERIES
    head = tl.program_id(1)
    token_start = tl.load(query_start_loc_R1 + request)
    token_stop = tl.load(query_start_loc_R1 + request + 1)
    if query < token_stop - token_start:
        first = tl.load(first_split_R1 + request)
        count = tl.load(first_split_R1 + request + 1) - first
        row = (first.to(tl.int64) * K + head // G) * (QUERIES * G) + query * G + head % G
        step = K * QUERIES * G  # rows from one split to the next

        overflow = first + count > capacity
        stored = tl.where(overflow, 0, count)
        split_P = tl.arange(0, SPLITS_PAD)
        lse_P = tl.load(
            partial_lse + row + split_P.to(tl.int64) * step,
            mask=split_P < stored,
            other=float("-inf"),
        )
        peak = tl.max(lse_P, axis=0)
        if HAS_SINKS:
            sink = tl.load(sinks_H + head).to(tl.float32) * 1.4426950408889634
            peak = tl.maximum(peak, sink)
        peak = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(tl.exp2(lse_P - peak), axis=0)
        if HAS_SINKS:
            total += tl.exp2(sink - peak)

        d_D = tl.arange(0, D_PAD)
        acc_D = tl.zeros([D_PAD], dtype=tl.float32)
        for chunk in range(0, stored, BLOCK_P):
            part_P = chunk + tl.arange(0, BLOCK_P)
            row_P = row + part_P.to(tl.int64) * step
            weight_P = tl.exp2(
                tl.load(partial_lse + row_P, mask=part_P < stored, other=float("-inf")) - peak
            )
            part_PD = tl.load(
                partial_out + (row_P * D)[:, None] + d_D[None, :],
                mask=(part_P < stored)[:, None] & (d_D < D)[None, :],
                other=0.0,
            )
            acc_D += tl.sum(part_PD * weight_P[:, None], axis=0)
        seen = total > 0.0
        total = tl.where(seen, total, 1.0)
        lse = tl.where(seen, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        acc_D = acc_D * (v_scale / total)
        acc_D = tl.where(overflow, float("nan"), acc_D)
        token = (token_start + query).to(tl.int64)
        tl.store(
            out_THD + token * out_token_stride + head * out_head_stride + d_D,
            acc_D.to(out_THD.dtype.element_ty),
            mask=d_D < D,
        )
        if HAS_LSE:
            tl.store(
                lse_TH + token * lse_token_stride + head, tl.where(overflow, float("nan"), lse)
            )


def reduce_splits(
    work: AttentionWork,
    query_start_loc_R1: torch.Tensor,
    out_THD: torch.Tensor,
    *,
    v_scale: float,
    sinks_H: torch.Tensor | None,
    lse_TH: torch.Tensor | None,
) -> None:
    """Join the splits of every decode of `work` into `out_THD` (and `lse_TH`, natural logarithm).

    `out = v_scale * sum_p exp(lse_p - lse) out_p`, with `lse = log(sum_p exp(lse_p) + exp(sink))`.
    Writes the rows of the decodes' tokens only; zeros for a request without keys. Arguments are
    those of `attention.paged_attention`, which has checked them."""
    head_size = out_THD.shape[2]
    reduce_splits_kernel[(work.num_decodes * work.max_decode_queries, work.num_query_heads)](
        work.partial_out,
        work.partial_lse,
        query_start_loc_R1,
        work.first_split_R1,
        work.partial_lse if sinks_H is None else sinks_H,
        out_THD,
        work.partial_lse if lse_TH is None else lse_TH,
        work.splits_W8.shape[0],
        out_THD.stride(0),
        out_THD.stride(1),
        0 if lse_TH is None else lse_TH.stride(0),
        v_scale,
        K=work.num_kv_heads,
        G=work.num_query_heads // work.num_kv_heads,
        QUERIES=work.max_decode_queries,
        HAS_SINKS=sinks_H is not None,
        HAS_LSE=lse_TH is not None,
        num_warps=_REDUCE_WARPS,
        **_reduce_constants(head_size, work.split_bound),
    )


_REDUCE_WARPS = 2


def _reduce_constants(head_size: int, split_bound: int) -> dict[str, int]:
    return {
        "D": head_size,
        "D_PAD": triton.next_power_of_2(head_size),
        "SPLITS_PAD": triton.next_power_of_2(max(split_bound, 2)),
        "BLOCK_P": 8,
    }
