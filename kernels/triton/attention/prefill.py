"""Prefill attention: one program a tile of packed query rows and key/value head. Where few queries
see many keys, programs take splits of these, and the last of a tile joins them.

    keys of a tile    [low ---- | ------- all visible to every row ------- | diagonal ---- stop)
                       masked      no masks, whole tiles of BLOCK_N keys      masked
    (the masked part on the left exists with a sliding window only, and no key left of it is read;
    where rows see both sides of themselves, whole tiles reach to the sequence's end, or a window's;
    where some have ends of their own, the masked part on the right reaches to the last of these)

Key tiles are always visited from the left and start at multiples of BLOCK_N, so that a query's
result does not depend on how its prompt was chunked. The specification is in `attention`."""

import triton
import triton.language as tl

from kernels.triton.attention import gluon_prefill
from kernels.triton.attention.call import AttentionCall
from kernels.triton.attention.lists import KEY_TILE, MOST_SPLIT_PREFILLS, tile_rows
from kernels.triton.attention.reduce import all_arrived, join_splits
from kernels.triton.attention.tile import attend_tile
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import HOPPER_SHARED_BYTES, SHORT_SHARED_BYTES, shared_memory


@triton.jit(do_not_specialize=["window", "table_stride", "first_prefill"])
def prefill_kernel(
    q_THD,  # [T, H, D], D contiguous
    k_cache_BKSD,  # [B, K, S, D], D contiguous
    v_cache_BKSD,
    block_table_RM,  # int32 [R, M]
    tiles_W8,  # int32 [W, 8], see attention_lists; tile splits if SPLITS_PAD
    counts_3,  # int32 [3]: splits of decodes, tiles, prefills that are split
    alibi_slopes_H,  # float32 [H], read if HAS_ALIBI
    sinks_H,  # float32 [H], read if HAS_SINKS
    partial_out,  # float32 [slots, K, BLOCK_M, D], written where keys are split
    partial_lse,  # float32 [slots, K, BLOCK_M], likewise, in units of log2
    arrivals,  # int32 [slots, K], all 0 before and after
    out_THD,  # [T, H, D], written
    ends_T,  # int32 [T], behind the last key that each token sees, read if HAS_ENDS
    table_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    score_scale,
    multiplier,
    window,
    first_prefill,  # of this launch, of those that are split
    K: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    S: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,  # of keys and of values
    HEAD_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLOTS: tl.constexpr,  # entries of a prefill that is split
    SPLITS_PAD: tl.constexpr,  # 0: keys are not split
    JOINED_D: tl.constexpr,  # columns joined at once
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BY_BITS: tl.constexpr,
    BOTH_SIDES: tl.constexpr,  # of sequences that are whole in the step
    HAS_ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (tile, or split of a tile; key/value head)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    TILE_QUERIES: tl.constexpr = BLOCK_M // G
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    if SPLITS_PAD == 0:
        entry = tiles_W8 + tile.to(tl.int64) * 8
        has_work = tile < tl.load(counts_3 + 1)
    else:
        entry = tiles_W8 + (first_prefill * SLOTS + tile).to(tl.int64) * 8
        has_work = first_prefill + tile // SLOTS < tl.load(counts_3 + 2)
        has_work = has_work & (tl.load(entry + 7) > 0)
    if has_work:
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

        # [first, left) masked, [left, right) seen by all rows, [right, stop) masked
        low = 0
        left = 0
        right = (position + 1) // BLOCK_N * BLOCK_N
        stop = key_stop
        last_M = position_M
        if HAS_ENDS:
            last_M = tl.load(ends_T + token_M, mask=valid_M, other=0) - 1
            stop = tl.max(last_M, axis=0) + 1
        if BOTH_SIDES:
            stop = position + tl.load(entry + 2) - token_start
            right = stop // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            low = tl.maximum(position - window + 1, 0)
            all_see = tl.maximum(key_stop - window, 0)
            if BOTH_SIDES:
                stop = tl.minimum(stop, key_stop - 1 + window)
                right = tl.minimum(stop, position + window) // BLOCK_N * BLOCK_N
            left = tl.minimum((all_see + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
            right = tl.maximum(right, left)
        first = low // BLOCK_N * BLOCK_N
        if SPLITS_PAD > 0:  # a split begins and ends where a tile of keys does
            first = tl.maximum(first, tl.load(entry + 4))
            stop = tl.minimum(stop, tl.load(entry + 5))
            left = tl.minimum(tl.maximum(left, first), stop)
            right = tl.minimum(tl.maximum(right, left), stop)

        acc_MD = tl.zeros([BLOCK_M, D_PAD], dtype=tl.float32)
        peak_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        k_cache = k_cache_BKSD + kv_head * HEAD_STRIDE
        v_cache = v_cache_BKSD + kv_head * HEAD_STRIDE
        table = block_table_RM + request * table_stride
        if HAS_WINDOW:
            for first_key in range(first, left, BLOCK_N):
                acc_MD, peak_M, total_M = attend_tile(
                    q_MD, acc_MD, peak_M, total_M, first_key, low, stop,
                    position_M, last_M, slope_M, k_cache, v_cache, table,
                    score_scale, multiplier, window,
                    D, D_PAD, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, True, False,
                    HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, BY_BITS, BOTH_SIDES,
                )  # fmt: skip
        for first_key in range(left, right, BLOCK_N):
            acc_MD, peak_M, total_M = attend_tile(
                q_MD, acc_MD, peak_M, total_M, first_key, low, stop,
                position_M, last_M, slope_M, k_cache, v_cache, table,
                score_scale, multiplier, window,
                D, D_PAD, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, False, False,
                HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, BY_BITS, BOTH_SIDES,
            )  # fmt: skip
        for first_key in range(right, stop, BLOCK_N):
            acc_MD, peak_M, total_M = attend_tile(
                q_MD, acc_MD, peak_M, total_M, first_key, low, stop,
                position_M, last_M, slope_M, k_cache, v_cache, table,
                score_scale, multiplier, window,
                D, D_PAD, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, True, False,
                HAS_WINDOW, HAS_SOFTCAP, HAS_ALIBI, BY_BITS, BOTH_SIDES,
            )  # fmt: skip

        if not HAS_ALIBI:
            peak_M = peak_M * multiplier
        if SPLITS_PAD == 0:
            _store_tile(
                acc_MD, peak_M, total_M, token_M, q_head_M, valid_M, sinks_H, out_THD,
                out_token_stride, out_head_stride, D, D_PAD, HAS_SINKS,
            )  # fmt: skip
        else:
            slot = tl.load(entry + 6).to(tl.int64) - first_prefill * SLOTS
            own_row_M = (tile.to(tl.int64) * K + kv_head) * BLOCK_M + row_M
            seen_M = total_M > 0.0
            total_M = tl.where(seen_M, total_M, 1.0)
            tl.store(
                partial_out + (own_row_M * D)[:, None] + d_D[None, :],
                acc_MD * (1.0 / total_M)[:, None],
                mask=mask_MD,
            )
            lse_M = tl.where(seen_M, peak_M + tl.log2(total_M), float("-inf"))
            tl.store(partial_lse + own_row_M, lse_M, mask=valid_M)
            if all_arrived(arrivals + slot * K + kv_head, tl.load(entry + 7)):
                join_splits(
                    partial_out, partial_lse, (slot * K + kv_head) * BLOCK_M, K * BLOCK_M,
                    tl.load(entry + 7), valid_M, q_head_M, token_M, sinks_H, out_THD,
                    out_token_stride, out_head_stride,
                    D, D_PAD, JOINED_D, BLOCK_M, SPLITS_PAD, 1, HAS_SINKS,
                )  # fmt: skip


@triton.jit
def _store_tile(
    acc_MD, peak_M, total_M, token_M, q_head_M, valid_M, sinks_H, out_THD,
    out_token_stride, out_head_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    if HAS_SINKS:
        sink_M = tl.load(sinks_H + q_head_M).to(tl.float32) * 1.4426950408889634
        new_peak_M = tl.maximum(peak_M, sink_M)
        decay_M = tl.exp2(peak_M - new_peak_M)
        total_M = total_M * decay_M + tl.exp2(sink_M - new_peak_M)
        acc_MD = acc_MD * decay_M[:, None]
    d_D = tl.arange(0, D_PAD)
    # a padding row may have seen nothing; it is not stored
    total_M = tl.where(total_M > 0.0, total_M, 1.0)
    acc_MD = acc_MD * (1.0 / total_M)[:, None]
    out_row_M = token_M * out_token_stride + q_head_M * out_head_stride
    tl.store(
        out_THD + out_row_M[:, None] + d_D[None, :],
        acc_MD.to(out_THD.dtype.element_ty),
        mask=valid_M[:, None] & (d_D < D)[None, :],
    )


def prefill_attention(call: AttentionCall) -> None:
    """Write the prefills' rows of the results.

    `out = softmax(scores) v`, see `paged_attention`. The running softmax over tiles is that of
    "FlashAttention-2" (Dao 2023)."""
    work, options = call.work, (call.options, call.work.ends_T is None)
    ends_T = work.ends_T
    in_gluon = work.variant.prompts_in_gluon and gluon_prefill.takes(call)
    launches = [(work.tiles_W8, work.max_tiles, 0, 0)]
    for first in range(0, work.max_split_prefills, MOST_SPLIT_PREFILLS):
        number = min(work.max_split_prefills - first, MOST_SPLIT_PREFILLS)
        launches.append((work.tile_splits_W8, number * work.tile_slots, work.tile_slots, first))
    for entries_W8, num_entries, slots, first in launches:

        def prepare(number: int = num_entries, slots: int = slots, first: int = first) -> Launch:
            call.check()
            num_kv_heads, head_size = call.k_cache_BKSD.shape[1], call.k_cache_BKSD.shape[3]
            group_size = work.num_query_heads // num_kv_heads
            if in_gluon:
                constants, launch = gluon_prefill.configuration(group_size, head_size, slots)
            else:
                constants, launch = configuration(
                    group_size=group_size,
                    head_size=head_size,
                    kv_bytes=call.k_cache_BKSD.element_size(),
                    shared_bytes=shared_memory(call.q_THD.device),
                    tile_slots=slots,
                )
            constants |= launch | {"BOTH_SIDES": work.both_sides, "HAS_ENDS": ends_T is not None}
            return call.launch((number, num_kv_heads), constants, first)

        tensors = call.tensors(entries_W8, work.tile_arrivals)
        tensors += (work.counts_3 if ends_T is None else ends_T,)
        bound = gluon_prefill.launches if in_gluon else _launches
        bound(tensors, (options, slots, first), prepare)


_launches = BoundLaunches(prefill_kernel)


def configuration(
    *, group_size: int, head_size: int, kv_bytes: int, shared_bytes: int, tile_slots: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options); BLOCK_M is what the list of tiles was made for.

    `shared_bytes`: of a thread block, see `shared_memory`."""
    padded = max(16, triton.next_power_of_2(head_size))
    block_n, num_stages = key_tile(padded, kv_bytes, shared_bytes)
    constants = {
        "G": group_size,
        "D": head_size,
        "D_PAD": padded,
        "BLOCK_M": tile_rows(head_size),
        "BLOCK_N": block_n,
        "SLOTS": tile_slots,
        "SPLITS_PAD": triton.next_power_of_2(tile_slots) if tile_slots else 0,
        "JOINED_D": min(64, padded),
    }
    return constants, {"num_warps": 8, "num_stages": num_stages}


def key_tile(padded_head_size: int, kv_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """(BLOCK_N, num_stages). Five stages have two tiles of keys under way while one is multiplied:
    one stage goes to the block table, so with three each tile is waited for as soon as it is
    asked for. Hopper has room for two of 128 keys of 128 elements, half as many pauses between
    products: 464 TFLOP/s on an H100, 421 with 64 keys; heads of 64 are slower so. The accumulator
    of 256 elements a head leaves few registers. What each takes of sm_80 to sm_120 is in the table
    of compiled kernels."""
    is_short = shared_bytes < SHORT_SHARED_BYTES
    if kv_bytes == 4:  # above 64 elements a head some registers spill; a short memory has no room
        return (16, 5) if is_short else (32, 2)
    if padded_head_size <= 128:
        if padded_head_size == 128 and shared_bytes >= HOPPER_SHARED_BYTES:
            return KEY_TILE, 5
        return (32 if is_short and kv_bytes == 1 and padded_head_size == 128 else 64), 5
    if is_short and kv_bytes == 2:
        return 16, 3
    return (16 if padded_head_size > 256 else 16 * kv_bytes), 5
