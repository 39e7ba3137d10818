"""The convolution of recurrent layers: `kernels.torch.recurrence.convolve` is the specification.

A program takes some tokens and channels. Inputs before a request's first token in the step are in
the record of the block of the token before that one."""

import torch
import triton
import triton.language as tl

from kernels.interface.operations import AttentionMetadata
from kernels.interface.recurrence import ConvolutionParams, RecurrentCache
from kernels.triton.bound_launch import BoundLaunches, Launch
from kernels.triton.device_limits import dependent_launch
from kernels.triton.recurrence.requests import check_cache, check_step, follows, step_tensors
from kernels.triton.tensor_checks import FLOATS, check_tensor

BLOCK_T = 16
BLOCK_C = 128
"""Tokens and channels a program."""


@triton.jit(do_not_specialize=["num_requests", "table_stride"])
def convolve_kernel(
    x_TC,  # [T, C]
    weight_WC,  # float32 [W, C]
    bias_C,  # float32 [C], read if HAS_BIAS
    tails_BVC,  # [B, W - 1, C], written where a block begins
    inputs_BSC,  # [B, S, C], written
    query_start_loc_R1,  # int32 [R + 1]
    seq_lens_R,  # int32 [R]
    block_table_RM,  # int32 [R, M]
    out_TC,  # [T, C], written
    num_requests,
    x_stride,
    block_stride,
    table_stride,
    C: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """`out_t = silu(bias + sum_w weight_w * x_(t - W + 1 + w))`; program (tokens, channels)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    channel_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_inside_C = channel_C < C
    num_tokens = tl.load(query_start_loc_R1 + num_requests)
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token_T = token_T < num_tokens
    token_T = tl.minimum(token_T, num_tokens - 1)

    # the request of each token: the first that ends behind it
    request_T = tl.zeros([BLOCK_T], tl.int32)
    last_T = request_T + num_requests - 1
    num_left = num_requests
    while num_left > 0:
        middle_T = (request_T + last_T) // 2
        is_behind_T = tl.load(query_start_loc_R1 + middle_T + 1) <= token_T
        request_T = tl.where(is_behind_T, middle_T + 1, request_T)
        last_T = tl.where(is_behind_T, last_T, middle_T)
        num_left = num_left // 2
    first_T = request_T  # the request that its inputs in the step begin with
    has_T = follows(
        query_start_loc_R1, seq_lens_R, block_table_RM, num_requests, table_stride, first_T, S
    )
    while tl.max(has_T.to(tl.int32), axis=0) > 0:
        first_T = tl.where(has_T, first_T - 1, first_T)
        has_T = has_T & follows(
            query_start_loc_R1, seq_lens_R, block_table_RM, num_requests, table_stride, first_T, S
        )

    start_T = tl.load(query_start_loc_R1 + first_T)
    num_first_T = tl.load(query_start_loc_R1 + first_T + 1) - start_T
    begin_T = tl.load(seq_lens_R + first_T) - num_first_T  # the position of that token
    position_T = begin_T + token_T - start_T
    table_T = block_table_RM + request_T.to(tl.int64) * table_stride
    own_T = tl.load(table_T + position_T // S, mask=is_token_T, other=0).to(tl.int64)
    read_T = tl.maximum(begin_T - 1, 0) // S
    old_T = tl.load(table_T + read_T, mask=is_token_T, other=0).to(tl.int64) * block_stride
    is_kept_TC = (own_T > 0)[:, None] & is_inside_C[None, :]
    is_begin_TC = is_kept_TC & (position_T % S == 0)[:, None]
    own_T = own_T * block_stride

    sum_TC = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if HAS_BIAS:
        sum_TC += tl.load(bias_C + channel_C, mask=is_inside_C, other=0.0)[None, :]
    for w in tl.static_range(W):
        behind_T = token_T - (W - 1 - w)
        row_T = position_T - (W - 1 - w) - read_T * S
        is_new_T = is_token_T & (behind_T >= start_T)
        is_old_T = is_token_T & (behind_T < start_T) & (begin_T > 0)
        seen_TC = tl.load(
            x_TC + (behind_T.to(tl.int64) * x_stride)[:, None] + channel_C[None, :],
            mask=is_new_T[:, None] & is_inside_C[None, :],
            other=0.0,
        ).to(tl.float32)
        if w < W - 1:
            row_TC = tl.load(
                inputs_BSC + (old_T + row_T * C)[:, None] + channel_C[None, :],
                mask=(is_old_T & (row_T >= 0))[:, None] & is_inside_C[None, :],
                other=0.0,
            )
            tail_TC = tl.load(
                tails_BVC + (old_T + (W - 1 + row_T) * C)[:, None] + channel_C[None, :],
                mask=(is_old_T & (row_T < 0))[:, None] & is_inside_C[None, :],
                other=0.0,
            )
            seen_TC += row_TC.to(tl.float32) + tail_TC.to(tl.float32)  # but one of them are 0
            at_TC = tails_BVC + (own_T + w * C)[:, None] + channel_C[None, :]
            tl.store(at_TC, seen_TC.to(tails_BVC.dtype.element_ty), mask=is_begin_TC)
        else:
            at_TC = inputs_BSC + (own_T + position_T % S * C)[:, None] + channel_C[None, :]
            tl.store(at_TC, seen_TC.to(inputs_BSC.dtype.element_ty), mask=is_kept_TC)
        weight_C = tl.load(weight_WC + w * C + channel_C, mask=is_inside_C, other=0.0)
        sum_TC += seen_TC * weight_C[None, :]
    if SILU:
        sum_TC = sum_TC / (1.0 + tl.exp(-sum_TC))
    tl.store(
        out_TC + (token_T.to(tl.int64) * C)[:, None] + channel_C[None, :],
        sum_TC.to(out_TC.dtype.element_ty),
        mask=is_token_T[:, None] & is_inside_C[None, :],
    )


def convolve(
    x_TC: torch.Tensor,
    params: ConvolutionParams,
    cache: RecurrentCache,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """See `Operations.convolve`. Rows of padding tokens are left as they are.

    Raises:
        ValueError: a tensor of another shape, dtype or device than the layer's.
    """
    out_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    tensors = (
        x_TC,
        params.weight_WC,
        params.weight_WC if params.bias_C is None else params.bias_C,
        cache.tails_BVC,
        cache.inputs_BSC,
        *step_tensors(metadata),
        out_TC,
    )
    options = (params.bias_C is None, params.silu, metadata.block_size)
    if len(x_TC) and len(metadata.seq_lens_R):
        _launches(tensors, options, lambda: _checked_launch(x_TC, params, cache, metadata))
    return out_TC


_launches = BoundLaunches(convolve_kernel)


def _checked_launch(
    x_TC: torch.Tensor,
    params: ConvolutionParams,
    cache: RecurrentCache,
    metadata: AttentionMetadata,
) -> Launch:
    (W, C), S, device = params.weight_WC.shape, metadata.block_size, x_TC.device
    check_step(metadata, device)
    check_tensor("x_TC", x_TC, (len(x_TC), C), FLOATS, device, contiguous_dims=1)
    check_tensor("weight_WC", params.weight_WC, (W, C), torch.float32, device)
    if params.bias_C is not None:
        check_tensor("bias_C", params.bias_C, (C,), torch.float32, device)
    parts = [
        ("inputs", cache.inputs_BSC, ((S, C), params.shape.dtype)),
        ("tails", cache.tails_BVC, ((W - 1, C), params.shape.dtype)),
    ]
    check_cache(parts, device)
    return Launch(
        (triton.cdiv(len(x_TC), BLOCK_T), triton.cdiv(C, BLOCK_C)),
        (
            len(metadata.seq_lens_R),
            x_TC.stride(0),
            cache.inputs_BSC.stride(0),
            metadata.block_table_RM.stride(0),
        ),
        {
            "C": C,
            "W": W,
            "S": S,
            "BLOCK_T": BLOCK_T,
            "BLOCK_C": BLOCK_C,
            "HAS_BIAS": params.bias_C is not None,
            "SILU": params.silu,
            **dependent_launch(device),
        },
    )
