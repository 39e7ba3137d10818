"""Decode attention: persistent programs over a list of (request, split) pieces of keys.

The specification is in `attention`; a split's result is attention over its keys alone."""

import torch
import triton
import triton.language as tl

from kernels.interface.operations import AttentionParams
from kernels.triton.attention_tile import attend_tile
from kernels.triton.attention_work import AttentionWork

LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_decodes", "capacity", "window", "table_stride"])
def decode_kernel(
    q_THD,  # [T, H, D], D contiguous
    k_cache_BKSD,  # [B, K, S, D], D contiguous
    v_cache_BKSD,
    block_table_RM,  # int32 [R, M]
    splits_W8,  # int32 [W, 8], see attention_work
    first_split_R1,  # int32 [num_decodes + 1]
    alibi_slopes_H,  # float32 [H], read if HAS_ALIBI
    partial_out,  # float32 [W, K, QUERIES * G, D], written
    partial_lse,  # float32 [W, K, QUERIES * G], written, in units of log2
    num_decodes,
    capacity,  # W
    table_stride,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    score_scale,
    multiplier,
    window,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Program p takes pieces p, p + P, ...; a piece is one split and one key/value head."""
    row_M = tl.arange(0, BLOCK_M)
    query_M = row_M // G
    head_M = row_M % G
    d_D = tl.arange(0, D_PAD)
    num_pieces = tl.minimum(tl.load(first_split_R1 + num_decodes), capacity) * K
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        split = tl.cast(piece // K, tl.int64)
        kv_head = tl.cast(piece % K, tl.int64)
        entry = splits_W8 + split * 8
        request = tl.load(entry + 0).to(tl.int64)
        key_start = tl.load(entry + 1)
        key_stop = tl.load(entry + 2)
        token_start = tl.load(entry + 3)
        token_stop = tl.load(entry + 4)
        position_M = tl.load(entry + 5) + query_M

        valid_M = (query_M < token_stop - token_start) & (query_M < QUERIES)
        q_head_M = kv_head * G + head_M
        mask_MD = valid_M[:, None] & (d_D < D)[None, :]
        q_row_M = (token_start + query_M).to(tl.int64) * q_token_stride + q_head_M * q_head_stride
        q_MD = tl.load(q_THD + q_row_M[:, None] + d_D[None, :], mask=mask_MD, other=0.0)
        slope_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        if HAS_ALIBI:
            slope_M = tl.load(alibi_slopes_H + q_head_M) * 1.4426950408889634

        acc_MD = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
        peak_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        k_cache = k_cache_BKSD + kv_head * k_head_stride
        v_cache = v_cache_BKSD + kv_head * v_head_stride
        table = block_table_RM + request * table_stride
        for first_key in range(key_start // BLOCK_N * BLOCK_N, key_stop, BLOCK_N):
            acc_MD, peak_M, total_M = attend_tile(
                q_MD, acc_MD, peak_M, total_M, first_key, key_start, key_stop,
                position_M, slope_M, k_cache, v_cache, table,
                k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
                score_scale, multiplier, window,
                D, D_PAD, S, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            )  # fmt: skip
        seen_M = total_M > 0.0
        divisor_M = tl.where(seen_M, total_M, 1.0)
        if not HAS_ALIBI:
            peak_M = peak_M * multiplier
        lse_M = tl.where(seen_M, peak_M + tl.log2(divisor_M), float("-inf"))
        out_row_M = (split * K + kv_head) * (QUERIES * G) + row_M
        tl.store(
            partial_out + (out_row_M * D)[:, None] + d_D[None, :],
            acc_MD / divisor_M[:, None],
            mask=mask_MD,
        )
        tl.store(partial_lse + out_row_M, lse_M, mask=valid_M)


def score_numbers(params: AttentionParams, k_scale: float) -> tuple[float, float]:
    """(score_scale, multiplier) of `attend_tile`, which works in units of log2."""
    scale = params.scale * k_scale
    if params.softcap is not None:
        return scale / params.softcap, params.softcap * LOG2_E
    return scale * LOG2_E, scale * LOG2_E


def decode_attention(
    q_THD: torch.Tensor,
    k_cache_BKSD: torch.Tensor,
    v_cache_BKSD: torch.Tensor,
    block_table_RM: torch.Tensor,
    work: AttentionWork,
    params: AttentionParams,
    *,
    k_scale: float,
) -> None:
    """Write each split's output and log-sum-exp to the scratch of `work`.

    `out = softmax(scores) v` over the keys of the split, unscaled by v_scale, float32 and the
    log-sum-exp in units of log2. The split-KV form is that of "Flash-Decoding" (Dao, Haziza, Massa,
    Sizov 2023). Arguments are those of `attention.paged_attention`, which has checked them."""
    _, num_kv_heads, block_size, head_size = k_cache_BKSD.shape
    group_size = work.num_query_heads // num_kv_heads
    alibi_slopes_H = params.alibi_slopes_H
    score_scale, multiplier = score_numbers(params, k_scale)
    constants, launch = configuration(
        group_size=group_size,
        head_size=head_size,
        max_queries=work.max_decode_queries,
        kv_bytes=k_cache_BKSD.element_size(),
    )
    decode_kernel[(work.num_programs,)](
        q_THD,
        k_cache_BKSD,
        v_cache_BKSD,
        block_table_RM,
        work.splits_W8,
        work.first_split_R1,
        q_THD if alibi_slopes_H is None else alibi_slopes_H,
        work.partial_out,
        work.partial_lse,
        work.num_decodes,
        work.splits_W8.shape[0],
        block_table_RM.stride(0),
        q_THD.stride(0),
        q_THD.stride(1),
        *k_cache_BKSD.stride()[:3],
        *v_cache_BKSD.stride()[:3],
        score_scale,
        multiplier,
        work.sliding_window or 0,
        K=num_kv_heads,
        S=block_size,
        HAS_WINDOW=work.sliding_window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        HAS_ALIBI=alibi_slopes_H is not None,
        **constants,
        **launch,
    )


def configuration(
    *, group_size: int, head_size: int, max_queries: int, kv_bytes: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options). Tiles of keys are 8 KiB and so few registers are used that four
    programs fit on a multiprocessor (two to three with fp8 or 256 elements a head): decode waits
    for memory, and only other programs fill the gaps between pieces. Five stages give two buffers,
    because a stage before the keys goes to the block table."""
    padded = max(16, triton.next_power_of_2(head_size))
    block_m = max(16, triton.next_power_of_2(max_queries * group_size))
    block_n = min(64, max(16, 8192 // (padded * kv_bytes)))
    constants = {
        "G": group_size,
        "D": head_size,
        "D_PAD": padded,
        "QUERIES": max_queries,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }
    return constants, {"num_warps": 4, "num_stages": 5}
