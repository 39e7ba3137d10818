"""Recurrent layers: `kernels.torch.recurrence.recur` is the specification.

A program takes a request, a head and some of its P values, and keeps these columns of the state in
registers. Requests of one token, and drafts, add a row at a time; others a block at a time:

    u_i = b_i (v_i - e^{c_i} S_0 k_i - sum_{j<i} L_ij u_j)    L_ij = e^{c_i - c_j} (k_j . k_i)

The products with S_0 and of keys with each other are of all rows at once; the sum over j goes row
by row. A row's bits depend on its place in the block and the rows before it, not on the step that
they were in.

A longer block is gone through in tiles of 16 rows, each with the state at its own start as S_0: it
follows from the block's and the rows before, as the state at a block's end does."""

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.interface.operations import AttentionMetadata
from kernels.interface.recurrence import MOST_KEY_ELEMENTS, RecurrenceParams, RecurrentCache
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.recurrence.block import (
    closed,
    decayed_products,
    dot,
    dot_of_keys,
    row_of,
    softplus,
)
from kernels.triton.recurrence.requests import check_cache, check_step, follows, step_tensors
from kernels.triton.tensor_checks import FLOATS, check_tensor

_TILE_ROWS = 16
"""Rows of the products."""


@triton.jit(do_not_specialize=["table_stride"])
def recur_kernel(
    qkv_TC,  # [T, C]
    a_TN,  # [T, H * D], read if HAS_BIAS
    b_TH,  # [T, H], read if RULE is "delta"
    rate_H,  # float32
    bias_HD,  # float32, read if HAS_BIAS
    skip_H,  # float32, read if HAS_SKIP
    states_BHNP,  # float32, written where a block begins
    keys_BSKN,  # float32, written
    updates_BSHP,  # float32, written
    decays_BSHD,  # float32, written
    query_start_loc_R1,  # int32 [R + 1]
    seq_lens_R,  # int32 [R]
    block_table_RM,  # int32 [R, M]
    out_TV,  # [T, H * P], written
    qkv_stride,
    a_stride,
    b_stride,
    block_stride,
    table_stride,
    q_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_P: tl.constexpr,
    D_PAD: tl.constexpr,
    S_PAD: tl.constexpr,
    Q_START: tl.constexpr,
    K_START: tl.constexpr,
    V_START: tl.constexpr,
    RULE: tl.constexpr,
    NORMED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BY_BLOCKS: tl.constexpr,
    TAKES_ALL: tl.constexpr,  # else those alone of one token, or of more by blocks
    PDL: tl.constexpr,
):
    """Program (request; head and part of P)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request, num_requests = tl.program_id(0), tl.num_programs(0)
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    TILE: tl.constexpr = S if S < S_PAD else S_PAD
    head = tl.program_id(1) // PARTS
    part = tl.program_id(1) % PARTS
    key_head = head // (H // K)
    # one of the programs that share a key, or decays, writes it
    num_sums = tl.where(part == 0, D, 0)
    num_key = tl.where(head % (H // K) + part == 0, N, 0)

    token = tl.load(query_start_loc_R1 + request)
    stop = tl.load(query_start_loc_R1 + request + 1)
    position = tl.load(seq_lens_R + request) - (stop - token)
    first_token = token
    # drafts have a table each
    token_stride = tl.where(stop - token == 1, table_stride, 0)
    if TAKES_ALL or not BY_BLOCKS:
        is_own = stop > token
        if not TAKES_ALL:
            is_own = stop - token == 1
        is_draft = follows(
            query_start_loc_R1, seq_lens_R, block_table_RM, num_requests, table_stride, request, S
        )
        is_own = is_own & (is_draft == 0)
        if is_own:
            last = request + 1
            while follows(
                query_start_loc_R1, seq_lens_R, block_table_RM, num_requests, table_stride, last, S
            ):
                last += 1
            stop = tl.load(query_start_loc_R1 + last)
    else:
        is_own = stop - token > 1

    if is_own:
        row_S = tl.arange(0, S_PAD)
        n_N = tl.arange(0, N_PAD)
        p_P = part * BLOCK_P + tl.arange(0, BLOCK_P)
        d_D = tl.arange(0, D_PAD)
        is_n_N, is_p_P, is_d_D = n_N < N, p_P < P, d_D < D
        # places in a block
        state_NP = (head * N + n_N)[:, None] * P + p_P[None, :]
        key_SN = ((row_S * K + key_head) * N)[:, None] + n_N[None, :]
        update_SP = ((row_S * H + head) * P)[:, None] + p_P[None, :]
        sum_SD = ((row_S * H + head) * D)[:, None] + d_D[None, :]
        # and of a token
        q_at = qkv_TC + Q_START + key_head * N
        k_at = qkv_TC + K_START + key_head * N
        v_at = qkv_TC + V_START + head * P
        rate = tl.load(rate_H + head)
        bias_D = tl.zeros([D_PAD], tl.float32)
        if HAS_BIAS:
            bias_D = tl.load(bias_HD + head * D + d_D, mask=is_d_D, other=0.0)
        skip = 0.0
        if HAS_SKIP:
            skip = tl.load(skip_H + head)

        table = block_table_RM + request.to(tl.int64) * table_stride
        block, filled = position // S, position % TILE
        own = tl.load(table + block).to(tl.int64)
        # the record of the token before, whose rows are all there or those up to it
        before = tl.maximum(position - 1, 0)
        source = tl.load(table + before // S).to(tl.int64) * block_stride
        num_rows = tl.where(filled > 0, filled, tl.minimum(position, TILE))
        num_n = tl.where(position > 0, N, 0)  # of a state that is there
        is_np_NP = (n_N < num_n)[:, None] & is_p_P[None, :]
        S_NP = tl.load(states_BHNP + source + state_NP, mask=is_np_NP, other=0.0)
        tile = 0  # the first row of the tile, in its block
        base_D = tl.zeros([D_PAD], tl.float32)  # the sums of log decays before it
        if S > TILE:
            while tile + TILE <= before % S:
                is_row_S1 = (row_S < TILE)[:, None]
                is_key_SN, is_sum_SD = is_row_S1 & is_n_N[None, :], is_row_S1 & is_d_D[None, :]
                at_SN, at_SP = key_SN + tile * (K * N), update_SP + tile * (H * P)
                k_SN = tl.load(keys_BSKN + source + at_SN, mask=is_key_SN, other=0.0)
                u_SP = tl.load(
                    updates_BSHP + source + at_SP, mask=is_row_S1 & is_p_P[None, :], other=0.0
                )
                at_SD = decays_BSHD + source + sum_SD + tile * (H * D)
                c_SD = tl.load(at_SD, mask=is_sum_SD, other=0.0)
                S_NP = closed(S_NP, k_SN, u_SP, c_SD - base_D[None, :], row_S, TILE)
                base_D = row_of(c_SD, row_S, TILE - 1)
                tile += TILE
        is_row_S1 = (row_S < num_rows)[:, None]
        at_SN, at_SP = key_SN + tile * (K * N), update_SP + tile * (H * P)
        k_SN = tl.load(keys_BSKN + source + at_SN, mask=is_row_S1 & is_n_N[None, :], other=0.0)
        u_SP = tl.load(updates_BSHP + source + at_SP, mask=is_row_S1 & is_p_P[None, :], other=0.0)
        at_SD = decays_BSHD + source + sum_SD + tile * (H * D)
        c_SD = tl.load(at_SD, mask=is_row_S1 & is_d_D[None, :], other=0.0)
        if filled == 0:
            S_NP = closed(S_NP, k_SN, u_SP, c_SD - base_D[None, :], row_S, TILE)
            if S > TILE:
                tile = position % S
                base_D = tl.where(tile > 0, row_of(c_SD, row_S, TILE - 1), 0.0)

        while token < stop:
            # rows [filled, top) of the tile are those of tokens [token, token + top - filled)
            top = filled + 1
            if BY_BLOCKS:
                top = tl.minimum(TILE, filled + stop - token)
            is_new_S1 = ((row_S >= filled) & (row_S < top))[:, None]
            is_known_S1 = (row_S < filled)[:, None]
            total_D = tl.where(filled > 0, row_of(c_SD, row_S, filled - 1), base_D)
            c_SD = tl.where(is_known_S1, c_SD, 0.0)
            u_SP = tl.where(is_known_S1, u_SP, 0.0)
            share_S = tl.zeros([S_PAD], tl.float32)
            for row in range(filled, top):
                of_row = (token + row - filled).to(tl.int64)
                step_D = tl.full([D_PAD], 1.0, tl.float32)
                if HAS_BIAS:
                    at_D = a_TN + of_row * a_stride + head * D + d_D
                    step_D = tl.load(at_D, mask=is_d_D, other=0.0).to(tl.float32) + bias_D
                    step_D = softplus(step_D)
                total_D += -rate * step_D
                c_SD = tl.where((row_S == row)[:, None], total_D[None, :], c_SD)
                share = 1.0
                if RULE == "delta":
                    share = tl.load(b_TH + of_row * b_stride + head).to(tl.float32)
                    share = 1.0 / (1.0 + tl.exp(-share))
                elif RULE == "discretised":
                    share = tl.sum(step_D, axis=0)
                share_S = tl.where(row_S == row, share, share_S)

            if BY_BLOCKS:
                token_S = (token + row_S - filled).to(tl.int64)
                at_S1 = (token_S * qkv_stride)[:, None]
                is_new_SN = is_new_S1 & is_n_N[None, :]
                is_new_SP = is_new_S1 & is_p_P[None, :]
                q_SN = tl.load(q_at + at_S1 + n_N[None, :], mask=is_new_SN, other=0.0)
                new_SN = tl.load(k_at + at_S1 + n_N[None, :], mask=is_new_SN, other=0.0)
                v_SP = tl.load(v_at + at_S1 + p_P[None, :], mask=is_new_SP, other=0.0)
                q_SN, new_SN = q_SN.to(tl.float32), new_SN.to(tl.float32)
                v_SP = v_SP.to(tl.float32)
                if NORMED:
                    q_SN = q_SN * tl.rsqrt(tl.sum(q_SN * q_SN, axis=1) + 1e-6)[:, None]
                    new_SN = new_SN * tl.rsqrt(tl.sum(new_SN * new_SN, axis=1) + 1e-6)[:, None]
                q_SN = q_SN * q_scale
                k_SN = tl.where(is_new_S1, new_SN, tl.where(is_known_S1, k_SN, 0.0))
                decay_SD = tl.exp(c_SD - base_D[None, :])
                if RULE == "delta":
                    left_SP = v_SP - dot_of_keys(k_SN * decay_SD, S_NP)
                    of_keys_SS = decayed_products(k_SN, k_SN, c_SD, row_S, top, D > 1)
                    of_keys_SS = tl.where(row_S[None, :] < row_S[:, None], of_keys_SS, 0.0)
                    for row in range(filled, top):
                        weight_S = row_of(of_keys_SS, row_S, row)
                        u_P = row_of(left_SP, row_S, row) - tl.sum(weight_S[:, None] * u_SP, axis=0)
                        u_P = tl.sum(tl.where(row_S == row, share_S, 0.0), axis=0) * u_P
                        u_SP = tl.where((row_S == row)[:, None], u_P[None, :], u_SP)
                else:
                    u_SP = tl.where(is_new_S1, share_S[:, None] * v_SP, u_SP)
                of_queries_SS = decayed_products(q_SN, k_SN, c_SD, row_S, top, D > 1)
                out_SP = dot_of_keys(q_SN * decay_SD, S_NP) + dot(of_queries_SS, u_SP)
                if HAS_SKIP:
                    out_SP += skip * v_SP
                tl.store(
                    out_TV + (token_S * (H * P) + head * P)[:, None] + p_P[None, :],
                    out_SP.to(out_TV.dtype.element_ty),
                    mask=is_new_SP,
                )
            else:
                of_token = tl.cast(token, tl.int64)
                q_N = tl.load(q_at + of_token * qkv_stride + n_N, mask=is_n_N, other=0.0)
                k_N = tl.load(k_at + of_token * qkv_stride + n_N, mask=is_n_N, other=0.0)
                v_P = tl.load(v_at + of_token * qkv_stride + p_P, mask=is_p_P, other=0.0)
                q_N, k_N, v_P = q_N.to(tl.float32), k_N.to(tl.float32), v_P.to(tl.float32)
                if NORMED:
                    q_N = q_N * tl.rsqrt(tl.sum(q_N * q_N, axis=0) + 1e-6)
                    k_N = k_N * tl.rsqrt(tl.sum(k_N * k_N, axis=0) + 1e-6)
                q_N = q_N * q_scale
                k_SN = tl.where(is_new_S1, k_N[None, :], tl.where(is_known_S1, k_SN, 0.0))
                # exp(c_i - c_j) k_j of the rows up to this one
                weighted_SN = k_SN * tl.exp(tl.where(is_known_S1, total_D[None, :] - c_SD, 0.0))
                decay_D = tl.exp(total_D - base_D)
                u_P = v_P
                if RULE == "delta":
                    u_P = u_P - tl.sum((k_N * decay_D)[:, None] * S_NP, axis=0)
                    weight_S = tl.sum(weighted_SN * k_N[None, :], axis=1)
                    u_P = u_P - tl.sum(weight_S[:, None] * u_SP, axis=0)  # its own row is 0
                u_P = tl.sum(share_S, axis=0) * u_P
                u_SP = tl.where(is_new_S1, u_P[None, :], u_SP)
                out_P = tl.sum((q_N * decay_D)[:, None] * S_NP, axis=0)
                weight_S = tl.sum(weighted_SN * q_N[None, :], axis=1)
                out_P += tl.sum(weight_S[:, None] * u_SP, axis=0)
                if HAS_SKIP:
                    out_P += skip * v_P
                tl.store(
                    out_TV + of_token * (H * P) + head * P + p_P,
                    out_P.to(out_TV.dtype.element_ty),
                    mask=is_p_P,
                )

            if own > 0:
                at = own * block_stride
                num_n = tl.where(filled + tile == 0, N, 0)  # a state is written once
                is_np_NP = (n_N < num_n)[:, None] & is_p_P[None, :]
                is_key_SN = is_new_S1 & (n_N < num_key)[None, :]
                is_sum_SD = is_new_S1 & (d_D < num_sums)[None, :]
                tl.store(states_BHNP + at + state_NP, S_NP, mask=is_np_NP)
                at_SN, at_SP = key_SN + tile * (K * N), update_SP + tile * (H * P)
                at_SD = decays_BSHD + at + sum_SD + tile * (H * D)
                tl.store(keys_BSKN + at + at_SN, k_SN, mask=is_key_SN)
                tl.store(updates_BSHP + at + at_SP, u_SP, mask=is_new_S1 & is_p_P[None, :])
                tl.store(at_SD, c_SD, mask=is_sum_SD)
            token += top - filled
            filled = top
            if (filled == TILE) & (token < stop):
                S_NP = closed(S_NP, k_SN, u_SP, c_SD - base_D[None, :], row_S, TILE)
                filled = 0
                if S > TILE:
                    tile = (tile + TILE) % S
                    base_D = tl.where(tile > 0, row_of(c_SD, row_S, TILE - 1), 0.0)
                if tile == 0:
                    block += 1
                    own = tl.load(table + (token - first_token) * token_stride + block)
                    own = own.to(tl.int64)


def recur(
    qkv_TC: torch.Tensor,
    a_TN: torch.Tensor | None,
    b_TH: torch.Tensor | None,
    params: RecurrenceParams,
    cache: RecurrentCache,
    metadata: AttentionMetadata,
    *,
    only_blocks: bool = False,
) -> torch.Tensor:
    """See `Operations.recur`. Rows of padding tokens are left as they are.

    Requests are computed beside one another: none may start behind a block that another fills in
    the same step, but for requests of one token that directly follow one another: drafts.

    Args:
        only_blocks: requests of one token are computed as others are: with the same bits.

    Raises:
        ValueError: a tensor of another shape, dtype or device than the layer's, or a key or a block
            that is too large.
    """
    shape = params.shape
    num_values = shape.num_heads * shape.value_size
    out_TV = torch.empty((len(qkv_TC), num_values), dtype=qkv_TC.dtype, device=qkv_TC.device)
    tensors = (
        qkv_TC,
        qkv_TC if a_TN is None else a_TN,
        qkv_TC if b_TH is None else b_TH,
        params.rate_H,
        params.rate_H if params.bias_HD is None else params.bias_HD,
        params.rate_H if params.skip_H is None else params.skip_H,
        cache.states_BHNP,
        cache.keys_BSKN,
        cache.updates_BSHP,
        cache.decays_BSHD,
        *step_tensors(metadata),
        out_TV,
    )
    if not len(qkv_TC) or not len(metadata.seq_lens_R):
        return out_TV
    forms = [(True, True)] if only_blocks else [(False, False)]
    if not only_blocks and len(qkv_TC) > len(metadata.seq_lens_R):
        forms.append((True, False))
    has = (params.bias_HD is None, params.skip_H is None)
    options = (shape, params.starts, params.rule, *has, params.normed, params.q_scale)
    for by_blocks, takes_all in forms:

        def prepare(by_blocks: bool = by_blocks, takes_all: bool = takes_all) -> Launch:
            _check(qkv_TC, a_TN, b_TH, params, cache, metadata)
            constants = constants_of(params, metadata.block_size, by_blocks, takes_all)
            numbers = [each.stride(0) for each in (*tensors[:3], cache.states_BHNP)]
            num_parts = triton.cdiv(shape.value_size, constants["BLOCK_P"])
            return Launch(
                (len(metadata.seq_lens_R), shape.num_heads * num_parts),
                (*numbers, metadata.block_table_RM.stride(0), params.q_scale),
                constants | dependent_launch(qkv_TC.device),
            )

        _launches(tensors, (options, metadata.block_size, by_blocks, takes_all), prepare)
    return out_TV


_launches = BoundLaunches(recur_kernel)


def constants_of(
    params: RecurrenceParams, block_size: int, by_blocks: bool, takes_all: bool
) -> dict[str, Any]:
    shape = params.shape
    n_pad = max(16, int(triton.next_power_of_2(shape.key_size)))
    p_pad = max(16, int(triton.next_power_of_2(shape.value_size)))
    return {
        "H": shape.num_heads,
        "K": shape.num_key_heads,
        "N": shape.key_size,
        "P": shape.value_size,
        "D": shape.decay_size,
        "S": block_size,
        "N_PAD": n_pad,
        # a state in a program's registers, beside the products' operands
        "BLOCK_P": min(p_pad, max(16, (2048 if by_blocks else 4096) // n_pad)),
        "D_PAD": 1 if shape.decay_size == 1 else n_pad,
        "S_PAD": _TILE_ROWS,
        **dict(zip(("Q_START", "K_START", "V_START"), params.starts, strict=True)),
        "RULE": params.rule,
        "NORMED": params.normed,
        "HAS_BIAS": params.bias_HD is not None,
        "HAS_SKIP": params.skip_H is not None,
        "BY_BLOCKS": by_blocks,
        "TAKES_ALL": takes_all,
    }


def _check(
    qkv_TC: torch.Tensor,
    a_TN: torch.Tensor | None,
    b_TH: torch.Tensor | None,
    params: RecurrenceParams,
    cache: RecurrentCache,
    metadata: AttentionMetadata,
) -> None:
    shape, device, T = params.shape, qkv_TC.device, len(qkv_TC)
    H, D = shape.num_heads, shape.decay_size
    check_step(metadata, device)
    if metadata.block_size > _TILE_ROWS and metadata.block_size % _TILE_ROWS:
        sizes = f"a GPU takes up to {_TILE_ROWS}, and multiples of that; change --block-size"
        raise ValueError(f"blocks of {metadata.block_size} tokens, {sizes}")
    check_tensor("qkv_TC", qkv_TC, qkv_TC.shape, FLOATS, device, contiguous_dims=1)
    if shape.key_size > MOST_KEY_ELEMENTS:
        limit = f"the limit is {MOST_KEY_ELEMENTS}; run this model with --device cpu"
        raise ValueError(f"keys of {shape.key_size} numbers, {limit}")
    check_tensor("rate_H", params.rate_H, (H,), torch.float32, device)
    if params.bias_HD is not None:
        assert a_TN is not None, "decays that follow from nothing"
        check_tensor("bias_HD", params.bias_HD, (H, D), torch.float32, device)
        check_tensor("a_TN", a_TN, (T, H * D), FLOATS, device, contiguous_dims=1)
    if params.rule == "delta":
        assert b_TH is not None, "a delta rule without shares"
        check_tensor("b_TH", b_TH, (T, H), FLOATS, device, contiguous_dims=1)
    if params.skip_H is not None:
        check_tensor("skip_H", params.skip_H, (H,), torch.float32, device)
    rows = [((metadata.block_size, *part), dtype) for part, dtype in shape.row_parts[:3]]
    names, views = ("states", "keys", "updates", "decays"), (cache[0], *cache[2:5])
    check_cache(list(zip(names, views, (shape.state_parts[0], *rows), strict=True)), device)
