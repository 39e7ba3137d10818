"""Decode attention: persistent programs over a list of (request, split) pieces of keys.

The specification is in `attention`; a split's result is attention over its keys alone. Whichever
program ends a request's last split joins them all, always in the same order."""

import triton
import triton.language as tl

from kernels.triton.attention.call import AttentionCall
from kernels.triton.attention.reduce import all_arrived, join_splits
from kernels.triton.attention.tile import attend_tile
from kernels.triton.bound_launch import BoundLaunches, Launch

AHEAD = False
"""Whether a piece's first keys are asked for while the one before it is joined. False is what has
run."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _ask_for(cache, at_NL):
    """Bring lines into the L2; nothing waits for them."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [(cache + at_NL).to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "table_stride"])
def decode_kernel(
    q_THD,  # [T, H, D], D contiguous
    k_cache_BKSD,  # [B, K, S, D], D contiguous
    v_cache_BKSD,
    block_table_RM,  # int32 [R, M]
    splits_W8,  # int32 [W, 8], see attention_lists
    counts_3,  # int32 [3]: the first is the number of splits
    alibi_slopes_H,  # float32 [H], read if HAS_ALIBI
    sinks_H,  # float32 [H], read if HAS_SINKS
    partial_out,  # float32 [W, K, QUERIES * G, D], written
    partial_lse,  # float32 [W, K, QUERIES * G], written, in units of log2
    arrivals_RK,  # int32 [R, K], all 0 before and after
    out_THD,  # [T, H, D], written
    table_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    score_scale,
    multiplier,
    window,
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of keys and of values
    HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    JOINED_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    AHEAD: tl.constexpr,
    BY_BITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes pieces p, p + P, ...; a piece is one split and one key/value head."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row_M = tl.arange(0, BLOCK_M)
    query_M = row_M // G
    head_M = row_M % G
    d_D = tl.arange(0, D_PAD)
    num_pieces = tl.load(counts_3) * K
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
        k_cache = k_cache_BKSD + kv_head * HEAD_STRIDE
        v_cache = v_cache_BKSD + kv_head * HEAD_STRIDE
        table = block_table_RM + request * table_stride
        if AHEAD:  # of the next piece; the last one's are its own
            next_piece = tl.minimum(piece + tl.num_programs(0), num_pieces - 1)
            next_entry = splits_W8 + tl.cast(next_piece // K, tl.int64) * 8
            next_table = block_table_RM + tl.load(next_entry).to(tl.int64) * table_stride
            next_N = tl.load(next_entry + 1) // BLOCK_N * BLOCK_N + tl.arange(0, BLOCK_N)
            is_next_N = next_N < tl.load(next_entry + 2)
            next_block_N = tl.load(next_table + next_N // S, mask=is_next_N, other=0)
        for first_key in range(key_start // BLOCK_N * BLOCK_N, key_stop, BLOCK_N):
            acc_MD, peak_M, total_M = attend_tile(
                q_MD, acc_MD, peak_M, total_M, first_key, key_start, key_stop,
                position_M, position_M, slope_M, k_cache, v_cache, table,
                score_scale, multiplier, window,
                D, D_PAD, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, True, QUERIES == 1,
                HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, BY_BITS, False,
            )  # fmt: skip
        if AHEAD:
            LINE: tl.constexpr = 1024 // k_cache_BKSD.dtype.element_ty.primitive_bitwidth
            LINES: tl.constexpr = (D_PAD + LINE - 1) // LINE
            next_at_N = next_block_N.to(tl.int64) * BLOCK_STRIDE + next_N % S * SLOT_STRIDE
            next_at_N += tl.cast(next_piece % K, tl.int64) * HEAD_STRIDE
            next_at_NL = next_at_N[:, None] + tl.arange(0, LINES)[None, :] * LINE
            _ask_for(k_cache_BKSD, next_at_NL)
            _ask_for(v_cache_BKSD, next_at_NL)
        seen_M = total_M > 0.0
        divisor_M = tl.where(seen_M, total_M, 1.0)
        if not HAS_ALIBI:
            peak_M = peak_M * multiplier
        lse_M = tl.where(seen_M, peak_M + tl.log2(divisor_M), float("-inf"))
        out_row_M = (split * K + kv_head) * (QUERIES * G) + row_M
        tl.store(
            partial_out + (out_row_M * D)[:, None] + d_D[None, :],
            acc_MD * (1.0 / divisor_M)[:, None],
            mask=mask_MD,
        )
        tl.store(partial_lse + out_row_M, lse_M, mask=valid_M)

        count = tl.load(entry + 7)
        if all_arrived(arrivals_RK + request * K + kv_head, count):
            joined_M = tl.arange(0, ROWS)
            token_M = (token_start + joined_M // G).to(tl.int64)
            join_splits(
                partial_out, partial_lse,
                (tl.load(entry + 6).to(tl.int64) * K + kv_head) * (QUERIES * G), K * QUERIES * G,
                count, joined_M < (token_stop - token_start) * G, kv_head * G + joined_M % G,
                token_M, sinks_H, out_THD, out_token_stride, out_head_stride,
                D, D_PAD, JOINED_D, ROWS, SPLITS_PAD, BLOCK_P, HAS_SINKS,
            )  # fmt: skip


def decode_attention(call: AttentionCall) -> None:
    """Write the decodes' rows of the results.

    `out = softmax(scores) v` over the keys of a split, then over all splits, see
    `attention_reduce`. The split-KV form is that of "Flash-Decoding" (Dao, Haziza, Massa, Sizov
    2023)."""
    work = call.work

    def prepare() -> Launch:
        call.check()
        num_kv_heads, head_size = call.k_cache_BKSD.shape[1], call.k_cache_BKSD.shape[3]
        constants, launch = configuration(
            group_size=work.num_query_heads // num_kv_heads,
            head_size=head_size,
            max_queries=work.max_decode_queries,
            kv_bytes=call.k_cache_BKSD.element_size(),
            split_bound=work.split_bound,
        )
        return call.launch((work.num_programs,), constants | launch | {"AHEAD": AHEAD})

    tensors = call.tensors(work.splits_W8, work.decode_arrivals_RK)
    _launches(tensors, (call.options, AHEAD), prepare)


_launches = BoundLaunches(decode_kernel)


def programs_a_multiprocessor(*, head_size: int, group_size: int, kv_bytes: int) -> int:
    """Of the kernel, where one warp has the registers for a program; else 0."""
    if head_size > 128 or group_size > 16 or kv_bytes > 2:
        return 0
    return 12 if head_size <= 64 else 8


def configuration(
    *, group_size: int, head_size: int, max_queries: int, kv_bytes: int, split_bound: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options). Decode waits for memory: what counts is how many programs have
    their keys under way on a multiprocessor, as only others fill the gaps between a program's
    pieces. With one warp a program eight or more fit, and no warp waits for another's part of a
    sum: 256 sequences of 1,024 tokens read 3.6 TB/s of an H200, where four programs of four warps
    read 2.6. Elsewhere tiles of keys are 8 KiB, and five stages give two buffers, because a stage
    before the keys goes to the block table."""
    padded = max(16, triton.next_power_of_2(head_size))
    rows = int(triton.next_power_of_2(max_queries * group_size))
    is_one_warp = rows <= 16 and programs_a_multiprocessor(
        head_size=head_size, group_size=group_size, kv_bytes=kv_bytes
    )
    constants = {
        "G": group_size,
        "D": head_size,
        "D_PAD": padded,
        "QUERIES": max_queries,
        "BLOCK_M": max(16, rows),
        "BLOCK_N": 32 if is_one_warp else min(64, max(16, 8192 // (padded * kv_bytes))),
        "ROWS": rows,
        "SPLITS_PAD": triton.next_power_of_2(max(split_bound, 2)),
        "JOINED_D": min(padded, 4096 // rows),
        "BLOCK_P": min(8, max(1, 4096 // (padded * rows))),
    }
    num_warps, num_stages = (1, 3) if is_one_warp else (4, 5)
    return constants, {"num_warps": num_warps, "num_stages": num_stages}
