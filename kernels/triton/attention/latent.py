"""Latent attention (MLA, arXiv:2405.04434): one key of R + L elements for all query heads, whose
last L are its value.

    score_ij = scale * (q_rope_i . k_rope_j + q_latent_i . c_j),  j <= i
    out_i    = sum_j softmax_j(score_ij) c_j

A row is a head of a token, in tiles of `HEADS` heads, so that a key is read once for as many. A
decode's keys are cut into splits that are joined in order; all else into tiles of queries. A prompt
takes the same way as a decode: 2 * (R + 2 L) products a key and head, where one of R + L and L
elements would take fewer and have other bits. The specification is `kernels/torch/attention.py`."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.interface.operations import AttentionParams, AttentionSpec
from kernels.triton.attention.reduce import all_arrived, join_splits
from kernels.triton.attention.work import AttentionWork, WorkLimits
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import SHORT_SHARED_BYTES, dependent_launch, shared_memory
from kernels.triton.tensor_checks import check_tensor

_LOG2_E = 1.4426950408889634
_TILE_ROWS = 32
"""Queries times heads of a tile; more sums of values would not fit in eight warps' registers."""
_SHORT_TILE_ROWS = 16
"""Where a thread block has less shared memory than the queries and two tiles of keys take."""
_MOST_LATENT, _MOST_ROTARY = 512, 64


@triton.jit
def _attend_latents(
    q_MR,  # [BLOCK_M, R_PAD], the rotary part
    q_ML,  # [BLOCK_M, L_PAD]
    acc_ML,  # float32 [BLOCK_M, L_PAD], unnormalised output
    peak_M,  # float32 [BLOCK_M], largest raw score so far
    total_M,  # float32 [BLOCK_M], sum of exp2(multiplier * (raw - peak))
    first_key,  # position of the tile's first key, a multiple of BLOCK_N
    key_stop,
    position_M,  # int32 [BLOCK_M], of each row's query
    cache,  # -> [B, S, R + L]
    table,  # -> int32 [M] of this request
    multiplier,
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    S: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running (acc, peak, total) after keys [first_key, first_key + BLOCK_N). Masked and
    unmasked tiles do the same arithmetic."""
    PRECISION: tl.constexpr = "tf32x3" if q_ML.dtype == tl.float32 else "ieee"
    n_N = tl.arange(0, BLOCK_N)
    key_N = first_key + n_N
    table_N = table + first_key // S + n_N // S
    slot_N = n_N % S
    if BLOCK_N < S:
        slot_N += first_key % S
    # a slot that was never written may hold NaN: no key behind the last one is read
    inside_N = key_N < key_stop
    block_N = tl.load(table_N, mask=inside_N, other=0) if MASKED else tl.load(table_N)
    at_N = cache + block_N.to(tl.int64) * BLOCK_STRIDE + slot_N * SLOT_STRIDE
    r_R = tl.arange(0, R_PAD)
    l_L = tl.arange(0, L_PAD)
    at_NR = at_N[:, None] + r_R[None, :]
    at_NL = at_N[:, None] + R + l_L[None, :]
    if MASKED:
        k_NR = tl.load(at_NR, mask=inside_N[:, None] & (r_R < R)[None, :], other=0.0)
        k_NL = tl.load(at_NL, mask=inside_N[:, None] & (l_L < L)[None, :], other=0.0)
    else:
        k_NR = tl.load(at_NR, mask=(r_R < R)[None, :], other=0.0)
        k_NL = tl.load(at_NL, mask=(l_L < L)[None, :], other=0.0)
    raw_MN = tl.dot(q_ML, tl.trans(k_NL), input_precision=PRECISION)
    raw_MN = tl.dot(q_MR, tl.trans(k_NR), acc=raw_MN, input_precision=PRECISION)
    if MASKED:
        visible_MN = inside_N[None, :] & (key_N[None, :] <= position_M[:, None])
        raw_MN = tl.where(visible_MN, raw_MN, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(raw_MN, axis=1))
    # a row that has seen nothing yet has a peak of -inf; -inf - -inf would be NaN
    safe_peak_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    p_MN = tl.exp2(tl.fma(raw_MN, multiplier, -(safe_peak_M * multiplier)[:, None]))
    decay_M = tl.exp2((peak_M - safe_peak_M) * multiplier)
    total_M = tl.fma(total_M, decay_M, tl.sum(p_MN, axis=1))
    acc_ML = tl.dot(
        p_MN.to(q_ML.dtype), k_NL, acc=acc_ML * decay_M[:, None], input_precision=PRECISION
    )
    return acc_ML, new_peak_M, total_M


@triton.jit(do_not_specialize=["table_stride"])
def latent_kernel(
    q_THD,  # [T, H, R + L], R + L contiguous
    cache_BSD,  # [B, S, R + L], likewise
    block_table_RM,  # int32 [R, M]
    entries_W8,  # int32 [W, 8], see attention_lists: splits if SPLITS_PAD, else tiles
    counts_3,  # int32 [3]: splits, tiles
    partial_out,  # float32 [W, GROUPS, HEADS, L], written if SPLITS_PAD
    partial_lse,  # float32 [W, GROUPS, HEADS], likewise, in units of log2
    arrivals_RK,  # int32 [R, GROUPS], all 0 before and after
    out_THL,  # [T, H, L], written
    table_stride,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    multiplier,
    GROUPS: tl.constexpr,  # of heads
    HEADS: tl.constexpr,  # of a group
    R: tl.constexpr,
    R_PAD: tl.constexpr,
    L: tl.constexpr,
    L_PAD: tl.constexpr,
    S: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS_PAD: tl.constexpr,  # 0: tiles that see all of their keys
    ROWS: tl.constexpr,  # of a join
    JOINED_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p takes pieces p, p + P, ...; a piece is one entry and one group of heads."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row_M = tl.arange(0, BLOCK_M)
    query_M = row_M // HEADS
    r_R = tl.arange(0, R_PAD)
    l_L = tl.arange(0, L_PAD)
    num_pieces = tl.load(counts_3 + (0 if SPLITS_PAD else 1)) * GROUPS
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        index = tl.cast(piece // GROUPS, tl.int64)
        group = tl.cast(piece % GROUPS, tl.int64)
        entry = entries_W8 + index * 8
        request = tl.load(entry + 0).to(tl.int64)
        if SPLITS_PAD > 0:
            first = tl.load(entry + 1)
            stop = tl.load(entry + 2)
            token_start = tl.load(entry + 3)
            token_stop = tl.load(entry + 4)
            position = tl.load(entry + 5)
            right = stop // BLOCK_N * BLOCK_N
        else:
            first = 0
            token_start = tl.load(entry + 1)
            token_stop = tl.minimum(tl.load(entry + 2), token_start + TILE_QUERIES)
            position = tl.load(entry + 3)
            stop = position + token_stop - token_start
            right = (position + 1) // BLOCK_N * BLOCK_N
        valid_M = (query_M < token_stop - token_start) & (query_M < TILE_QUERIES)
        position_M = position + query_M
        token_M = (token_start + query_M).to(tl.int64)
        head_M = group * HEADS + row_M % HEADS
        q_M = q_THD + token_M * q_token_stride + head_M * q_head_stride
        mask_MR = valid_M[:, None] & (r_R < R)[None, :]
        mask_ML = valid_M[:, None] & (l_L < L)[None, :]
        q_MR = tl.load(q_M[:, None] + r_R[None, :], mask=mask_MR, other=0.0)
        q_ML = tl.load(q_M[:, None] + R + l_L[None, :], mask=mask_ML, other=0.0)
        acc_ML = tl.zeros([BLOCK_M, L_PAD], dtype=tl.float32)
        peak_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total_M = tl.zeros([BLOCK_M], dtype=tl.float32)
        table = block_table_RM + request * table_stride
        for first_key in range(first, right, BLOCK_N):
            acc_ML, peak_M, total_M = _attend_latents(
                q_MR, q_ML, acc_ML, peak_M, total_M, first_key, stop, position_M, cache_BSD, table,
                multiplier, R, R_PAD, L, L_PAD, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, False,
            )  # fmt: skip
        for first_key in range(right, stop, BLOCK_N):
            acc_ML, peak_M, total_M = _attend_latents(
                q_MR, q_ML, acc_ML, peak_M, total_M, first_key, stop, position_M, cache_BSD, table,
                multiplier, R, R_PAD, L, L_PAD, S, BLOCK_STRIDE, SLOT_STRIDE, BLOCK_N, True,
            )  # fmt: skip
        divisor_M = tl.where(total_M > 0.0, total_M, 1.0)
        acc_ML = acc_ML * (1.0 / divisor_M)[:, None]
        if SPLITS_PAD > 0:
            at_M = (index * GROUPS + group) * HEADS + row_M
            tl.store(partial_out + (at_M * L)[:, None] + l_L[None, :], acc_ML, mask=mask_ML)
            tl.store(partial_lse + at_M, peak_M * multiplier + tl.log2(divisor_M), mask=valid_M)
            count = tl.load(entry + 7)
            if all_arrived(arrivals_RK + request * GROUPS + group, count):
                joined_M = tl.arange(0, ROWS)
                join_splits(
                    partial_out, partial_lse,
                    (tl.load(entry + 6).to(tl.int64) * GROUPS + group) * HEADS, GROUPS * HEADS,
                    count, joined_M < HEADS, group * HEADS + joined_M,
                    token_start.to(tl.int64) + tl.zeros([ROWS], tl.int64), partial_lse, out_THL,
                    out_token_stride, out_head_stride,
                    L, L_PAD, JOINED_D, ROWS, SPLITS_PAD, BLOCK_P, False,
                )  # fmt: skip
        else:
            out_M = out_THL + token_M * out_token_stride + head_M * out_head_stride
            result_ML = acc_ML.to(out_THL.dtype.element_ty)
            tl.store(out_M[:, None] + l_L[None, :], result_ML, mask=mask_ML)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLimits(WorkLimits):
    """Limits of latents: key/value heads are groups of query heads that a program takes."""

    tile_rows: int

    @property
    def tile_queries(self) -> int:
        return self.tile_rows // (self.num_query_heads // self.num_kv_heads)


def limits_of(spec: AttentionSpec, device: torch.device, *, only_tiles: bool) -> LatentLimits:
    """What the lists of these layers are made for. Raises ValueError: layers that the kernel cannot
    take, naming them."""
    latent, rows = spec.value_size, tile_rows(shared_memory(device))
    assert latent is not None, "keys without values in them"
    if latent > _MOST_LATENT or spec.head_size - latent > _MOST_ROTARY:
        raise ValueError(
            f"latents of {latent} elements and {spec.head_size - latent} that turn, the limits are "
            f"{_MOST_LATENT} and {_MOST_ROTARY}; run this model with --device cpu"
        )
    if spec.kv_dtype != spec.dtype or spec.sliding_window is not None:
        raise ValueError(
            f"latents in {spec.kv_dtype} of a model in {spec.dtype} with window "
            f"{spec.sliding_window}: leave --kv-cache-dtype at auto"
        )
    if device.type == "cuda" and spec.dtype == torch.float32:
        raise ValueError("latents in float32 fit no GPU; choose --dtype bfloat16 or float16")
    return LatentLimits(
        max_requests=spec.max_num_seqs,
        max_prefill_tokens=spec.max_num_batched_tokens,
        max_seq_len=spec.max_model_len,
        num_query_heads=spec.num_query_heads,
        num_kv_heads=spec.num_query_heads // heads_of_program(spec.num_query_heads, rows),
        head_size=latent,
        max_decode_queries=0 if only_tiles else 1,
        splits_tiles=False,
        tile_rows=rows,
    )


def tile_rows(shared_bytes: int) -> int:
    """Rows of a tile on a device with so much shared memory for a thread block."""
    return _SHORT_TILE_ROWS if shared_bytes < SHORT_SHARED_BYTES else _TILE_ROWS


def heads_of_program(num_heads: int, rows: int) -> int:
    """The largest part of all heads that a tile of so many rows has room for."""
    return next(each for each in range(min(num_heads, rows), 0, -1) if num_heads % each == 0)


def latent_attention(
    q_THD: torch.Tensor,
    cache_BKSD: torch.Tensor,
    block_table_RM: torch.Tensor,
    work: AttentionWork,
    params: AttentionParams,
    out_THL: torch.Tensor,
) -> torch.Tensor:
    """Attention of a step's tokens, `out_THL` written and returned. `work`: of `limits_of`. Safe to
    capture, as `paged_attention` is. Raises ValueError or TypeError: tensors that do not fit."""
    if work.has_decodes:
        _launch(q_THD, cache_BKSD, block_table_RM, work, params, out_THL, splits=True)
    if work.max_tiles:
        _launch(q_THD, cache_BKSD, block_table_RM, work, params, out_THL, splits=False)
    return out_THL


def _launch(
    q_THD: torch.Tensor,
    cache_BKSD: torch.Tensor,
    block_table_RM: torch.Tensor,
    work: AttentionWork,
    params: AttentionParams,
    out_THL: torch.Tensor,
    *,
    splits: bool,
) -> None:
    def prepare() -> Launch:
        (_, H, D), L = q_THD.shape, out_THL.shape[2]
        S, device = cache_BKSD.shape[2], q_THD.device
        shape = (len(cache_BKSD), 1, S, D)
        check_tensor("cache", cache_BKSD, shape, q_THD.dtype, device, contiguous_dims=1)
        check_tensor("q_THD", q_THD, (len(q_THD), work.num_query_heads, D), q_THD.dtype, device,
                     contiguous_dims=1)  # fmt: skip
        check_tensor("out", out_THL, (len(q_THD), H, L), q_THD.dtype, device, contiguous_dims=1)
        if params.softcap is not None or params.sinks_H is not None or params.sliding_window:
            raise ValueError("latents are attended without softcap, sinks and windows")
        constants, launch = configuration(
            num_heads=H, groups=work.num_kv_heads, rotary=D - L, latent=L,
            shared_bytes=shared_memory(device), split_bound=work.split_bound if splits else 0,
        )  # fmt: skip
        constants |= {"S": S, "BLOCK_STRIDE": cache_BKSD.stride(0), "SLOT_STRIDE": D}
        programs = work.num_programs if splits else work.max_tiles * work.num_kv_heads
        strides = (*q_THD.stride()[:2], *out_THL.stride()[:2])
        numbers = (block_table_RM.stride(0), *strides, params.scale * _LOG2_E)
        return Launch((programs,), numbers, {**constants, **dependent_launch(device), **launch})

    tensors = (
        q_THD,
        cache_BKSD,
        block_table_RM,
        work.splits_W8 if splits else work.tiles_W8,
        work.counts_3,
        work.partial_out,
        work.partial_lse,
        work.decode_arrivals_RK,
        out_THL,
    )
    _launches(tensors, (splits, params.scale, work.host_numbers), prepare)


_launches = BoundLaunches(latent_kernel)


def configuration(
    *, num_heads: int, groups: int, rotary: int, latent: int, shared_bytes: int, split_bound: int
) -> tuple[dict[str, int], dict[str, int]]:
    """(constants, launch options). `split_bound`: most splits of a decode; 0: of tiles."""
    heads, rows = num_heads // groups, tile_rows(shared_bytes)
    joined = int(triton.next_power_of_2(heads))
    block_m = max(16, joined) if split_bound else rows
    padded = max(16, triton.next_power_of_2(latent))
    constants = {
        "GROUPS": groups,
        "HEADS": heads,
        "R": rotary,
        "R_PAD": max(16, triton.next_power_of_2(rotary)),
        "L": latent,
        "L_PAD": padded,
        "TILE_QUERIES": 1 if split_bound else rows // heads,
        "BLOCK_M": block_m,
        "BLOCK_N": 16 if rows < _TILE_ROWS else 32,
        "SPLITS_PAD": int(triton.next_power_of_2(max(split_bound, 2))) if split_bound else 0,
        "ROWS": joined,
        "JOINED_D": min(padded, max(16, 4096 // joined)),
        "BLOCK_P": min(8, max(1, 4096 // (padded * joined))),
    }
    return constants, {"num_warps": 8, "num_stages": 5}
