"""Prefill attention: one program a tile of packed query rows and key/value head.

    keys of a tile    [low ---- | ------- all visible to every row ------- | diagonal ---- stop)
                       masked      no masks, whole tiles of BLOCK_N keys      masked
    (the masked part on the left exists with a sliding window only, and no key left of it is read)

Key tiles are always visited from the left and start at multiples of BLOCK_N, so that a query's
result does not depend on how its prompt was chunked. The specification is in `attention`."""

import torch
import triton
import triton.language as tl

from kernels.interface.operations import AttentionParams
from kernels.triton.attention_decode import score_numbers
from kernels.triton.attention_tile import attend_tile
from kernels.triton.attention_work import TILE_ROWS, AttentionWork
from kernels.triton.device_limits import SHORT_SHARED_BYTES, shared_memory


@triton.jit(do_not_specialize=["window", "table_stride"])
def prefill_kernel(
    q_THD,  # [T, H, D], D contiguous
    k_cache_BKSD,  # [B, K, S, D], D contiguous
    v_cache_BKSD,
    block_table_RM,  # int32 [R, M]
    tiles_W8,  # int32 [W, 8], see attention_work
    num_tiles_1,  # int32 [1]
    alibi_slopes_H,  # float32 [H], read if HAS_ALIBI
    sinks_H,  # float32 [H], read if HAS_SINKS
    out_THD,  # [T, H, D], written
    lse_TH,  # float32 [T, H], written if HAS_LSE, natural logarithm
    table_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    lse_token_stride,
    k_block_stride,
    k_head_stride,
    k_slot_stride,
    v_block_stride,
    v_head_stride,
    v_slot_stride,
    score_scale,
    multiplier,
    v_scale,
    window,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr,
):
    """Program (tile, key/value head)."""
    TILE_QUERIES: tl.constexpr = BLOCK_M // G
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    if tile < tl.load(num_tiles_1):
        entry = tiles_W8 + tile.to(tl.int64) * 8
        request = tl.load(entry + 0).to(tl.int64)
        token_start = tl.load(entry + 1)
        token_stop = tl.minimum(tl.load(entry + 2), token_start + TILE_QUERIES)
        position = tl.load(entry + 3)
        key_stop = position + token_stop - token_start

        row_M = tl.arange(0, BLOCK_M)
        query_M = row_M // G
        valid_M = query_M < token_stop - token_start
        position_M = position + query_M
        q_head_M = kv_head * G + row_M % G
        token_M = (token_start + query_M).to(tl.int64)
        d_D = tl.arange(0, D_PAD)
        mask_MD = valid_M[:, None] & (d_D < D)[None, :]
        q_row_M = token_M * q_token_stride + q_head_M * q_head_stride
        q_MD = tl.load(q_THD + q_row_M[:, None] + d_D[None, :], mask=mask_MD, other=0.0)
        slope_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        if HAS_ALIBI:
            slope_M = tl.load(alibi_slopes_H + q_head_M).to(tl.float32) * 1.4426950408889634

        # [low, left) masked, [left, right) seen by all rows, [right, key_stop) masked
        low = 0
        left = 0
        right = (position + 1) // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            low = tl.maximum(position - window + 1, 0)
            all_see = tl.maximum(key_stop - window, 0)
            left = tl.minimum((all_see + BLOCK_N - 1) // BLOCK_N * BLOCK_N, key_stop)
            right = tl.maximum(right, left)

        acc_MD = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
        peak_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        k_cache = k_cache_BKSD + kv_head * k_head_stride
        v_cache = v_cache_BKSD + kv_head * v_head_stride
        table = block_table_RM + request * table_stride
        if HAS_WINDOW:
            for first_key in range(low // BLOCK_N * BLOCK_N, left, BLOCK_N):
                acc_MD, peak_M, total_M = attend_tile(
                    q_MD, acc_MD, peak_M, total_M, first_key, low, key_stop,
                    position_M, slope_M, k_cache, v_cache, table,
                    k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
                    score_scale, multiplier, window,
                    D, D_PAD, S, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
                )  # fmt: skip
        for first_key in range(left, right, BLOCK_N):
            acc_MD, peak_M, total_M = attend_tile(
                q_MD, acc_MD, peak_M, total_M, first_key, low, key_stop,
                position_M, slope_M, k_cache, v_cache, table,
                k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
                score_scale, multiplier, window,
                D, D_PAD, S, BLOCK_N, False, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            )  # fmt: skip
        for first_key in range(right, key_stop, BLOCK_N):
            acc_MD, peak_M, total_M = attend_tile(
                q_MD, acc_MD, peak_M, total_M, first_key, low, key_stop,
                position_M, slope_M, k_cache, v_cache, table,
                k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
                score_scale, multiplier, window,
                D, D_PAD, S, BLOCK_N, True, HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI,
            )  # fmt: skip

        if not HAS_ALIBI:
            peak_M = peak_M * multiplier
        if HAS_SINKS:
            sink_M = tl.load(sinks_H + q_head_M).to(tl.float32) * 1.4426950408889634
            new_peak_M = tl.maximum(peak_M, sink_M)
            decay_M = tl.exp2(peak_M - new_peak_M)
            total_M = total_M * decay_M + tl.exp2(sink_M - new_peak_M)
            acc_MD = acc_MD * decay_M[:, None]
            peak_M = new_peak_M
        # a padding row may have seen nothing; it is not stored
        total_M = tl.where(total_M > 0.0, total_M, 1.0)
        acc_MD = acc_MD * (v_scale / total_M)[:, None]
        out_row_M = token_M * out_token_stride + q_head_M * out_head_stride
        tl.store(
            out_THD + out_row_M[:, None] + d_D[None, :],
            acc_MD.to(out_THD.dtype.element_ty),
            mask=mask_MD,
        )
        if HAS_LSE:
            lse_M = (peak_M + tl.log2(total_M)) * 0.6931471805599453
            tl.store(lse_TH + token_M * lse_token_stride + q_head_M, lse_M, mask=valid_M)


def prefill_attention(
    q_THD: torch.Tensor,
    k_cache_BKSD: torch.Tensor,
    v_cache_BKSD: torch.Tensor,
    block_table_RM: torch.Tensor,
    work: AttentionWork,
    params: AttentionParams,
    out_THD: torch.Tensor,
    *,
    k_scale: float,
    v_scale: float,
    lse_TH: torch.Tensor | None,
) -> None:
    """Write the prefills' rows of `out_THD` (and `lse_TH`).

    `out = softmax(scores) v`, see `attention`. The running softmax over tiles is that of
    "FlashAttention-2" (Dao 2023). Arguments are those of `attention.paged_attention`, which has
    checked them."""
    _, num_kv_heads, block_size, head_size = k_cache_BKSD.shape
    sinks_H, alibi_slopes_H = params.sinks_H, params.alibi_slopes_H
    score_scale, multiplier = score_numbers(params, k_scale)
    constants, launch = configuration(
        group_size=work.num_query_heads // num_kv_heads,
        head_size=head_size,
        kv_bytes=k_cache_BKSD.element_size(),
        shared_bytes=shared_memory(q_THD.device),
    )
    prefill_kernel[(work.max_tiles, num_kv_heads)](
        q_THD,
        k_cache_BKSD,
        v_cache_BKSD,
        block_table_RM,
        work.tiles_W8,
        work.num_tiles_1,
        q_THD if alibi_slopes_H is None else alibi_slopes_H,
        q_THD if sinks_H is None else sinks_H,
        out_THD,
        out_THD if lse_TH is None else lse_TH,
        block_table_RM.stride(0),
        q_THD.stride(0),
        q_THD.stride(1),
        out_THD.stride(0),
        out_THD.stride(1),
        0 if lse_TH is None else lse_TH.stride(0),
        *k_cache_BKSD.stride()[:3],
        *v_cache_BKSD.stride()[:3],
        score_scale,
        multiplier,
        v_scale,
        work.sliding_window or 0,
        S=block_size,
        HAS_WINDOW=work.sliding_window is not None,
        HAS_SOFTCAP=params.softcap is not None,
        HAS_ALIBI=alibi_slopes_H is not None,
        HAS_SINKS=sinks_H is not None,
        HAS_LSE=lse_TH is not None,
        **constants,
        **launch,
    )


def configuration(
    *, group_size: int, head_size: int, kv_bytes: int, shared_bytes: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options); BLOCK_M is what the list of tiles was made for.

    `shared_bytes`: of a thread block, see `shared_memory`."""
    padded = max(16, triton.next_power_of_2(head_size))
    block_n, num_stages = key_tile(padded, kv_bytes, shared_bytes)
    constants = {
        "G": group_size,
        "D": head_size,
        "D_PAD": padded,
        "BLOCK_M": TILE_ROWS,
        "BLOCK_N": block_n,
    }
    return constants, {"num_warps": 8, "num_stages": num_stages}


def key_tile(padded_head_size: int, kv_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """(BLOCK_N, num_stages). Five stages have two tiles of keys under way while one is multiplied:
    one stage goes to the block table, so with three each tile is waited for as soon as it is
    asked for. The accumulator of 256 elements a head leaves few registers, and converting fp8
    takes some more. What each takes of sm_80 to sm_120 is in the table of compiled kernels."""
    is_short = shared_bytes < SHORT_SHARED_BYTES
    if kv_bytes == 4:  # above 64 elements a head some registers spill; a short memory has no room
        return (16, 5) if is_short else (32, 2)
    if padded_head_size <= 128:
        return (32 if is_short and kv_bytes == 1 and padded_head_size == 128 else 64), 5
    if is_short and kv_bytes == 2:
        return 16, 3
    return 16 * kv_bytes, 5
