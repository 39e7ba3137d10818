"""Prefill attention for Hopper, in Gluon: of three groups of four warps one copies keys and values,
two attend to 64 query rows each. While one multiplies, the other does its softmax.

    producer      K0 V0 | K1 V1 | K2 V2 ...                       waits for a free stage
    consumer 0    QK0        | softmax0 | QK1 PV0 | softmax1 | QK2 PV1 ...
    consumer 1        QK0    |          | softmax0 | QK1 PV0 | softmax1 ...   products in turns

Lists, masks, arithmetic and the order of tiles are those of `prefill`, which takes what `takes`
refuses. Source of the schedule: "FlashAttention-3" (Shah et al. 2024)."""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton.attention.call import AttentionCall
from kernels.triton.attention.lists import KEY_TILE, tile_rows
from kernels.triton.bound_launch import BoundLaunches
from kernels.triton.device_limits import is_hopper

load_ahead = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""Triton's name of it changed after 3.6."""


@gluon.jit
def _copy_tile(
    to_ND, cache, table, first_key, low, stop, D: gl.constexpr, S: gl.constexpr,
    BLOCK_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Keys [low, stop) of a tile, and zeros for others: a slot that was never written may hold NaN,
    and 0 * NaN is NaN. 16 bytes a thread, of 32 rows at once."""
    ROWS: gl.constexpr = 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    row_N = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    d_1D = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    for part in gl.static_range(0, BLOCK_N, ROWS):
        key_N = first_key + part + row_N
        inside_N = (key_N >= low) & (key_N < stop)
        block_N = gl.load(table + key_N // S, mask=inside_N, other=0).to(gl.int64)
        at_N = block_N * BLOCK_STRIDE + key_N % S * SLOT_STRIDE
        load_ahead(
            to_ND.slice(part, ROWS),
            cache + (gl.expand_dims(at_N, 1) + d_1D),
            mask=gl.expand_dims(inside_N, 1) & (d_1D >= 0),
        )


@gluon.jit
def _produce(
    k_cache, v_cache, table, first, scoring, shared, D: gl.constexpr, S: gl.constexpr,
    BLOCK_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Keys and values of every tile from `first` on, each into a stage that both consumers left; of
    a split that sees nothing one tile, which is all masked."""
    low, stop, _, _ = scoring
    _, k_SND, v_SND, k_full_S, k_free_S, v_full_S, v_free_S, _ = shared
    for first_key in range(first, gl.maximum(stop, first + 1), BLOCK_N):
        count = (first_key - first) // BLOCK_N
        stage = count % STAGES
        is_free = (count // STAGES) & 1 ^ 1
        mbarrier.wait(k_free_S.index(stage), is_free)
        _copy_tile(
            k_SND.index(stage), k_cache, table, first_key, low, stop,
            D, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N,
        )  # fmt: skip
        async_copy.mbarrier_arrive(k_full_S.index(stage), increment_count=False)
        mbarrier.wait(v_free_S.index(stage), is_free)
        _copy_tile(
            v_SND.index(stage), v_cache, table, first_key, low, stop,
            D, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N,
        )  # fmt: skip
        async_copy.mbarrier_arrive(v_full_S.index(stage), increment_count=False)


@gluon.jit
def _softmax_of_tile(
    raw_MN, peak_M, total_M, first_key, position_M, scoring, BLOCK_N: gl.constexpr,
    MASKED: gl.constexpr, HAS_WINDOW: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(exp2 of the scores less the peak, the peak, the sum, decay of what was summed up before), as
    `tile.attend_tile`."""
    low, stop, multiplier, window = scoring
    if MASKED:
        key_N = first_key + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        key_1N = gl.expand_dims(key_N, 0)
        position_M1 = gl.expand_dims(position_M, 1)
        visible_MN = (key_1N < stop) & (key_1N <= position_M1)
        if HAS_WINDOW:
            visible_MN = visible_MN & (key_1N >= low) & (key_1N > position_M1 - window)
        raw_MN = gl.where(visible_MN, raw_MN, float("-inf"))
    new_peak_M = gl.maximum(peak_M, gl.max(raw_MN, axis=1))
    # a row that has seen nothing yet has a peak of -inf; -inf - -inf would be NaN
    safe_peak_M = gl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    p_MN = gl.exp2(raw_MN * multiplier - gl.expand_dims(safe_peak_M * multiplier, 1))
    decay_M = gl.exp2((peak_M - safe_peak_M) * multiplier)
    total_M = gl.fma(total_M, decay_M, gl.sum(p_MN, axis=1))
    return p_MN, new_peak_M, total_M, decay_M


@gluon.jit
def _times(acc_MD, factor_M, acc_layout: gl.constexpr):
    factor_M = gl.convert_layout(factor_M, gl.SliceLayout(1, acc_layout))
    return acc_MD * gl.expand_dims(factor_M, 1)


@gluon.jit
def _attend_next(
    p_MD, acc_MD, peak_M, total_M, count, first_key, position_M, scoring, shared,
    CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr, score_layout: gl.constexpr,
    acc_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile `count`, and with them the product of the tile before with its values.
    ptxas waits for both before the softmax: under it run the other consumer's products."""
    q_2MD, k_SND, v_SND, k_full_S, k_free_S, v_full_S, v_free_S, turn_2 = shared
    stage = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(k_full_S.index(stage), (count // STAGES) & 1)
    mbarrier.wait(v_full_S.index(before), ((count - 1) // STAGES) & 1)
    fence_async_shared()  # the copies were no bulk copies
    mbarrier.wait(turn_2.index(CONSUMER), (count & 1) ^ (1 - CONSUMER))
    zero_MN = gl.full([64, BLOCK_N], 0.0, gl.float32, score_layout)
    k_DN = k_SND.index(stage).permute((1, 0))
    raw_MN = warpgroup_mma(q_2MD.index(CONSUMER), k_DN, zero_MN, use_acc=False, is_async=True)
    acc_MD = warpgroup_mma(p_MD, v_SND.index(before), acc_MD, is_async=True)
    mbarrier.arrive(turn_2.index(1 - CONSUMER))
    raw_MN, acc_MD = warpgroup_mma_wait(1, deps=[raw_MN, acc_MD])
    mbarrier.arrive(k_free_S.index(stage))
    p_MN, peak_M, total_M, decay_M = _softmax_of_tile(
        raw_MN, peak_M, total_M, first_key, position_M, scoring,
        BLOCK_N, MASKED, HAS_WINDOW, score_layout,
    )  # fmt: skip
    acc_MD = warpgroup_mma_wait(0, deps=[acc_MD])
    mbarrier.arrive(v_free_S.index(before))
    acc_MD = _times(acc_MD, decay_M, acc_layout)
    p_MD = gl.convert_layout(p_MN.to(k_SND.dtype), gl.DotOperandLayout(0, acc_layout, 2))
    return p_MD, acc_MD, peak_M, total_M, count + 1


@gluon.jit
def _rows(
    CONSUMER: gl.constexpr, kv_head, token_start, token_stop, token_stride, head_stride,
    G: gl.constexpr, D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """(offsets, whether they are of a token) of a consumer's rows."""
    row_M = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d_1D = gl.expand_dims(gl.arange(0, D, layout=gl.SliceLayout(0, layout)), 0)
    token_M = token_start + row_M // G
    at_M = token_M.to(gl.int64) * token_stride + (kv_head * G + row_M % G) * head_stride
    return gl.expand_dims(at_M, 1) + d_1D, gl.expand_dims(token_M < token_stop, 1) & (d_1D >= 0)


@gluon.jit
def _attend(
    CONSUMER: gl.constexpr, tensors, tile, scoring, shared, G: gl.constexpr, D: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_SPLIT: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Rows [64 * CONSUMER, + 64) of the tile."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    # unlike layouts, so that no address is kept through the loops
    in_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    out_layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [4, 1], [1, 0])
    q_2MD, k_SND, v_SND, k_full_S, k_free_S, v_full_S, _, turn_2 = shared
    q_THD, out_THD, sinks_H, partial_out, partial_lse = tensors[:5]
    q_token_stride, q_head_stride, out_token_stride, out_head_stride = tensors[5:]
    kv_head, token_start, token_stop, position, first, left, right, own_row = tile
    _, stop, multiplier, _ = scoring
    dtype: gl.constexpr = k_SND.dtype

    q_at_MD, valid_MD = _rows(
        CONSUMER, kv_head, token_start, token_stop, q_token_stride, q_head_stride, G, D, in_layout
    )
    q_2MD.index(CONSUMER).store(gl.load(q_THD + q_at_MD, mask=valid_MD, other=0.0))
    fence_async_shared()
    tl.debug_barrier()

    own_M = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, score_layout))
    position_M = position + own_M // G
    peak_M = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    total_M = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, score_layout))
    acc_MD = gl.full([64, D], 0.0, gl.float32, acc_layout)

    mbarrier.wait(k_full_S.index(0), 0)
    fence_async_shared()
    mbarrier.wait(turn_2.index(CONSUMER), 1 - CONSUMER)
    zero_MN = gl.full([64, BLOCK_N], 0.0, gl.float32, score_layout)
    k_DN = k_SND.index(0).permute((1, 0))
    raw_MN = warpgroup_mma(q_2MD.index(CONSUMER), k_DN, zero_MN, use_acc=False, is_async=True)
    mbarrier.arrive(turn_2.index(1 - CONSUMER))
    raw_MN = warpgroup_mma_wait(0, deps=[raw_MN])
    mbarrier.arrive(k_free_S.index(0))
    p_MN, peak_M, total_M, _ = _softmax_of_tile(
        raw_MN, peak_M, total_M, first, position_M, scoring,
        BLOCK_N, True, HAS_WINDOW, score_layout,
    )  # fmt: skip
    p_MD = gl.convert_layout(p_MN.to(dtype), gl.DotOperandLayout(0, acc_layout, 2))
    count = 1
    begin = first + BLOCK_N
    if HAS_WINDOW:
        for first_key in range(begin, left, BLOCK_N):
            p_MD, acc_MD, peak_M, total_M, count = _attend_next(
                p_MD, acc_MD, peak_M, total_M, count, first_key, position_M, scoring, shared,
                CONSUMER, BLOCK_N, STAGES, True, HAS_WINDOW, score_layout, acc_layout,
            )  # fmt: skip
        begin = gl.maximum(begin, left)
    for first_key in range(begin, right, BLOCK_N):
        p_MD, acc_MD, peak_M, total_M, count = _attend_next(
            p_MD, acc_MD, peak_M, total_M, count, first_key, position_M, scoring, shared,
            CONSUMER, BLOCK_N, STAGES, False, HAS_WINDOW, score_layout, acc_layout,
        )  # fmt: skip
    for first_key in range(gl.maximum(begin, right), stop, BLOCK_N):
        p_MD, acc_MD, peak_M, total_M, count = _attend_next(
            p_MD, acc_MD, peak_M, total_M, count, first_key, position_M, scoring, shared,
            CONSUMER, BLOCK_N, STAGES, True, HAS_WINDOW, score_layout, acc_layout,
        )  # fmt: skip
    last = (count - 1) % STAGES
    mbarrier.wait(v_full_S.index(last), ((count - 1) // STAGES) & 1)
    fence_async_shared()
    acc_MD = warpgroup_mma(p_MD, v_SND.index(last), acc_MD, is_async=True)
    acc_MD = warpgroup_mma_wait(0, deps=[acc_MD])

    peak_M = peak_M * multiplier
    if HAS_SINKS and not IS_SPLIT:
        sink_M = gl.load(sinks_H + kv_head * G + own_M % G) * 1.4426950408889634
        new_peak_M = gl.maximum(peak_M, sink_M)
        decay_M = gl.exp2(peak_M - new_peak_M)
        total_M = total_M * decay_M + gl.exp2(sink_M - new_peak_M)
        acc_MD = _times(acc_MD, decay_M, acc_layout)
    seen_M = total_M > 0.0
    total_M = gl.where(seen_M, total_M, 1.0)
    acc_MD = _times(acc_MD, 1.0 / total_M, acc_layout)
    if IS_SPLIT:
        lse_M = gl.where(seen_M, peak_M + gl.log2(total_M), float("-inf"))
        gl.store(partial_lse + own_row + own_M, lse_M)
        part_at_MD, valid_MD = _rows(
            CONSUMER, kv_head * 0, 0, token_stop - token_start, G * D, D, G, D, acc_layout
        )
        gl.store(partial_out + own_row * D + part_at_MD, acc_MD, mask=valid_MD)
    else:
        out_at_MD, valid_MD = _rows(
            CONSUMER, kv_head, token_start, token_stop, out_token_stride, out_head_stride,
            G, D, out_layout,
        )  # fmt: skip
        out_MD = gl.convert_layout(acc_MD.to(dtype), out_layout)
        gl.store(out_THD + out_at_MD, out_MD, mask=valid_MD)


@gluon.jit
def _join(
    partial_out, partial_lse, first_row, step, count, token_start, token_stop, kv_head, sinks_H,
    out_THD, out_token_stride, out_head_stride,
    G: gl.constexpr, D: gl.constexpr, BLOCK_M: gl.constexpr, HAS_SINKS: gl.constexpr,
):  # fmt: skip
    """Joins the splits of a tile, one after another; the formula is `reduce.join_splits`'."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    row_M = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    valid_M = row_M // G < token_stop - token_start
    head_M = kv_head * G + row_M % G
    out_row_M = (token_start + row_M // G).to(gl.int64) * out_token_stride
    out_row_M = out_row_M + head_M * out_head_stride
    peak_M = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    for split in range(count):  # past the L1 cache: other programs wrote it while this one ran
        at_M = partial_lse + first_row + split * step + row_M
        peak_M = gl.maximum(peak_M, gl.load(at_M, cache_modifier=".cg"))
    if HAS_SINKS:
        sink_M = gl.load(sinks_H + head_M, mask=valid_M, other=0.0) * 1.4426950408889634
        peak_M = gl.maximum(peak_M, sink_M)
    peak_M = gl.where(peak_M == float("-inf"), 0.0, peak_M)
    for column in gl.static_range(0, D, 64):
        d_1D = column + gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, layout)), 0)
        valid_MD = gl.expand_dims(valid_M, 1) & (d_1D >= 0)
        total_M = gl.full([BLOCK_M], 0.0, gl.float32, gl.SliceLayout(1, layout))
        if HAS_SINKS:
            total_M += gl.exp2(sink_M - peak_M)
        acc_MD = gl.full([BLOCK_M, 64], 0.0, gl.float32, layout)
        for split in range(count):
            at_M = first_row + split * step + row_M
            part_at_MD = partial_out + (gl.expand_dims(at_M * D, 1) + d_1D)
            part_MD = gl.load(part_at_MD, mask=valid_MD, other=0.0, cache_modifier=".cg")
            factor_M = gl.exp2(gl.load(partial_lse + at_M, cache_modifier=".cg") - peak_M)
            total_M += factor_M
            acc_MD += part_MD * gl.expand_dims(factor_M, 1)
        acc_MD = acc_MD * gl.expand_dims(1.0 / gl.where(total_M > 0.0, total_M, 1.0), 1)
        out_at_MD = out_THD + (gl.expand_dims(out_row_M, 1) + d_1D)
        gl.store(out_at_MD, acc_MD.to(out_THD.dtype.element_ty), mask=valid_MD)


@gluon.jit(do_not_specialize=["window", "table_stride", "first_prefill"])
def gluon_prefill_kernel(
    q_THD, k_cache_BKSD, v_cache_BKSD, block_table_RM, tiles_W8, counts_3, alibi_slopes_H, sinks_H,
    partial_out, partial_lse, arrivals, out_THD, ends_T, table_stride, q_token_stride,
    q_head_stride, out_token_stride, out_head_stride, score_scale, multiplier, window,
    first_prefill,
    K: gl.constexpr, G: gl.constexpr, D: gl.constexpr, S: gl.constexpr,
    BLOCK_STRIDE: gl.constexpr, HEAD_STRIDE: gl.constexpr, SLOT_STRIDE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, SLOTS: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
    HAS_SINKS: gl.constexpr, BY_BITS: gl.constexpr, BOTH_SIDES: gl.constexpr,
    HAS_ENDS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Program (tile, or split of a tile; key/value head). Arguments are those of `prefill_kernel`;
    SLOTS 0: keys are not split."""
    gl.static_assert(
        not (HAS_SOFTCAP or HAS_ALIBI or BY_BITS or BOTH_SIDES or HAS_ENDS), "see `takes`"
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    tile = gl.program_id(0)
    kv_head = gl.program_id(1).to(gl.int64)
    if SLOTS == 0:
        entry = tiles_W8 + tile.to(gl.int64) * 8
        has_work = tile < gl.load(counts_3 + 1)
    else:
        entry = tiles_W8 + (first_prefill * SLOTS + tile).to(gl.int64) * 8
        has_work = first_prefill + tile // SLOTS < gl.load(counts_3 + 2)
        has_work = has_work & (gl.load(entry + 7) > 0)
    if has_work:
        request = gl.load(entry + 0).to(gl.int64)
        token_start = gl.load(entry + 1)
        token_stop = gl.minimum(gl.load(entry + 2), token_start + BLOCK_M // G)
        position = gl.load(entry + 3)
        stop = position + token_stop - token_start
        low = stop * 0
        left = stop * 0
        right = (position + 1) // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            low = gl.maximum(position - window + 1, 0)
            all_see = gl.maximum(stop - window, 0)
            left = gl.minimum((all_see + BLOCK_N - 1) // BLOCK_N * BLOCK_N, stop)
            right = gl.maximum(right, left)
        first = low // BLOCK_N * BLOCK_N
        if SLOTS > 0:
            first = gl.maximum(first, gl.load(entry + 4))
            stop = gl.minimum(stop, gl.load(entry + 5))
            left = gl.minimum(gl.maximum(left, first), stop)
            right = gl.minimum(gl.maximum(right, left), stop)

        dtype: gl.constexpr = q_THD.dtype.element_ty
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], dtype)
        one: gl.constexpr = mbarrier.MBarrierLayout()
        q_2MD = gl.allocate_shared_memory(dtype, [2, 64, D], layout)
        k_SND = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
        v_SND = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
        k_full_S = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
        k_free_S = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
        v_full_S = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
        v_free_S = gl.allocate_shared_memory(gl.int64, [STAGES, 1], one)
        turn_2 = gl.allocate_shared_memory(gl.int64, [2, 1], one)
        for at in gl.static_range(STAGES):
            mbarrier.init(k_full_S.index(at), count=128)  # by each thread of the producer
            mbarrier.init(v_full_S.index(at), count=128)
            mbarrier.init(k_free_S.index(at), count=2)
            mbarrier.init(v_free_S.index(at), count=2)
        for at in gl.static_range(2):
            mbarrier.init(turn_2.index(at), count=1)
        shared = (q_2MD, k_SND, v_SND, k_full_S, k_free_S, v_full_S, v_free_S, turn_2)
        scoring = (low, stop, multiplier, window)

        own_row = (tile.to(gl.int64) * K + kv_head) * BLOCK_M
        k_cache = k_cache_BKSD + kv_head * HEAD_STRIDE
        v_cache = v_cache_BKSD + kv_head * HEAD_STRIDE
        table = block_table_RM + request * table_stride
        tensors = (
            q_THD, out_THD, sinks_H, partial_out, partial_lse,
            q_token_stride, q_head_stride, out_token_stride, out_head_stride,
        )  # fmt: skip
        tile_of = (kv_head, token_start, token_stop, position, first, left, right, own_row)
        gl.warp_specialize(
            [
                (_attend, (
                    0, tensors, tile_of, scoring, shared,
                    G, D, BLOCK_N, STAGES, SLOTS > 0, HAS_WINDOW, HAS_SINKS,
                )),
                (_attend, (
                    1, tensors, tile_of, scoring, shared,
                    G, D, BLOCK_N, STAGES, SLOTS > 0, HAS_WINDOW, HAS_SINKS,
                )),
                (_produce, (
                    k_cache, v_cache, table, first, scoring, shared,
                    D, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, STAGES,
                )),
            ],
            [4, 4],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
        if SLOTS > 0:
            slot = gl.load(entry + 6).to(gl.int64) - first_prefill * SLOTS
            count = gl.load(entry + 7)
            arrived = arrivals + slot * K + kv_head
            tl.debug_barrier()
            if gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1:
                gl.store(arrived, 0)
                _join(
                    partial_out, partial_lse, (slot * K + kv_head) * BLOCK_M, K * BLOCK_M, count,
                    token_start, token_stop, kv_head, sinks_H, out_THD,
                    out_token_stride, out_head_stride, G, D, BLOCK_M, HAS_SINKS,
                )  # fmt: skip


launches = BoundLaunches(gluon_prefill_kernel)


def takes(call: AttentionCall) -> bool:
    """Whether the kernel has this call's shape: on Hopper, heads of 64 or 128 elements, queries and
    cache of one 16-bit dtype, no cap on scores, no slopes, and tokens that see what is before them
    only."""
    q_THD, work = call.q_THD, call.work
    return (
        is_hopper(q_THD.device)
        and q_THD.shape[2] in (64, 128)
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.dtype == call.k_cache_BKSD.dtype
        and call.params.softcap is None
        and call.params.alibi_slopes_H is None
        and not work.both_sides
        and work.ends_T is None
    )


def configuration(
    group_size: int, head_size: int, tile_slots: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options). Registers of the three groups' threads are at most 3 * 168 in
    sum; two stages of keys and values and the queries are 160 KiB at 128 elements a head."""
    constants = {
        "G": group_size,
        "D": head_size,
        "BLOCK_M": tile_rows(head_size),
        "BLOCK_N": KEY_TILE,
        "STAGES": 2,
        "CONSUMER_REGISTERS": 216,
        "PRODUCER_REGISTERS": 72,
        "SLOTS": tile_slots,
    }
    return constants, {"num_warps": 4}
