"""Steps of paged attention with poison wherever nothing must be read, for any backend."""

import torch

from kernels.interface.kv_cache import KVShape
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionParams,
    AttentionSpec,
    RotaryParams,
    allocate_kv_cache,
)


def make_planner(
    ops,
    heads,
    head_size,
    block_size,
    window=None,
    dtype=torch.float32,
    kv_dtype=None,
    bidirectional=False,
):
    return ops.make_attention_planner(
        AttentionSpec(
            num_query_heads=heads[0],
            num_kv_heads=heads[1],
            head_size=head_size,
            block_size=block_size,
            sliding_window=window,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
            max_model_len=8192,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            bidirectional=bidirectional,
        )
    )


def make_cache(ops, num_blocks, block_size, num_kv_heads, head_size, dtype):
    """Zeroed, of heads with equal keys and values."""
    shape = KVShape(block_size, num_kv_heads, head_size, head_size, dtype)
    return allocate_kv_cache(ops, num_blocks, shape)


def rotate(run, qkv_TN, kv_cache, *, positions_T, slot_mapping_T, **params):
    """Of a backend's `rotary_and_cache`, with everything else by name."""
    return run(qkv_TN, positions_T, slot_mapping_T, kv_cache, RotaryParams(**params))


def step(
    ops,
    requests,
    *,
    heads=(9, 3),
    head_size=16,
    block_size=4,
    window=None,
    dtype=torch.float32,
    hides_dropped=False,
    bidirectional=False,
):
    """(q, k cache, v cache, metadata) for requests of (queries, sequence length).

    Args:
        hides_dropped: ids of blocks behind the window are -1: they must not be used either.
    """
    generator = torch.Generator().manual_seed(len(requests))
    num_query_heads, num_kv_heads = heads
    width = max((-(-length // block_size) for _, length in requests), default=1)
    num_blocks = len(requests) * width + 1
    table = (torch.randperm(num_blocks - 1, generator=generator) + 1).view(-1, width).int()
    starts = torch.tensor([0, *(queries for queries, _ in requests)]).cumsum(0).int()
    num_tokens = int(starts[-1])
    shape = (num_blocks, block_size, num_kv_heads, head_size)
    k_cache = torch.randn(shape, generator=generator).to(dtype)
    v_cache = torch.randn(shape, generator=generator).to(dtype)
    q = torch.randn(num_tokens, num_query_heads, head_size, generator=generator).to(dtype)
    for request, (queries, length) in enumerate(requests):
        # whatever must not be read is NaN: blocks behind the window, slots after the end
        first = 0 if window is None else max(0, length - queries - window + 1)
        for cache in (k_cache, v_cache):
            cache[table[request, : first // block_size].long()] = float("nan")
            flat = cache[table[request].long()].flatten(0, 1)
            flat[length:] = float("nan")
            cache[table[request].long()] = flat.view(width, *cache.shape[1:])
        if hides_dropped:
            table[request, : first // block_size] = -1
    planner = make_planner(
        ops, heads, head_size, block_size, window, dtype, bidirectional=bidirectional
    )
    metadata = planner.plan(
        query_start_loc_R1=starts,
        seq_lens_R=torch.tensor([length for _, length in requests]).int(),
        block_table_RM=table,
        slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
        num_decodes=0,
        num_decode_tokens=0,
    )
    return q, k_cache, v_cache, metadata


def keys_in_panels(k_cache_BSKD: torch.Tensor) -> torch.Tensor:
    """As the native kernels want keys of float32: in panels [B, S / 16, K, D, 16], if they fit."""
    if k_cache_BSKD.dtype is not torch.float32 or k_cache_BSKD.shape[1] % 16:
        return k_cache_BSKD
    panels = k_cache_BSKD.unflatten(1, (-1, 16))  # [B, S / 16, 16, K, D]
    return panels.permute(0, 1, 3, 4, 2).contiguous()


def reference_paged_attention(
    q_THD: torch.Tensor,
    k_cache_BSKD: torch.Tensor,
    v_cache_BSKD: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    *,
    bidirectional: bool = False,
) -> torch.Tensor:
    """`softmax(softcap(scale * q k) + bias + mask) v` for each request, see `Operations`.

    The specification that every fast attention is tested against; not for serving.
    """
    sliding_window, softcap = params.sliding_window, params.softcap
    sinks_H, alibi_slopes_H = params.sinks_H, params.alibi_slopes_H
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    out_THD = torch.zeros(*q_THD.shape[:2], v_cache_BSKD.shape[3], dtype=dtype)
    group_size = q_THD.shape[1] // k_cache_BSKD.shape[2]
    starts = metadata.query_start_loc_R1.tolist()
    for request, length in enumerate(metadata.seq_lens_R.tolist()):
        start, stop = starts[request], starts[request + 1]
        blocks_M = metadata.block_table_RM[request].long()
        k_LHD, v_LHD = (
            cache[blocks_M].flatten(0, 1)[:length].to(dtype).repeat_interleave(group_size, dim=1)
            for cache in (k_cache_BSKD, v_cache_BSKD)
        )
        scores_HQL = params.scale * torch.einsum("qhd,lhd->hql", q_THD[start:stop].to(dtype), k_LHD)
        if softcap is not None:
            scores_HQL = softcap * torch.tanh(scores_HQL / softcap)
        key_L = torch.arange(length)
        query_Q1 = torch.arange(length - (stop - start), length).unsqueeze(1)
        if alibi_slopes_H is not None:
            scores_HQL = scores_HQL + alibi_slopes_H[:, None, None] * (key_L - query_Q1)
        if params.distance_bias_HN is not None:
            at_QL = (key_L - query_Q1).clamp(-params.reach, params.reach) + params.reach
            scores_HQL = scores_HQL + params.distance_bias_HN[:, at_QL]
        visible_QL = (key_L <= query_Q1) | bidirectional
        if sliding_window is not None:
            visible_QL &= (key_L - query_Q1).abs() < sliding_window
        scores_HQL = scores_HQL.masked_fill(~visible_QL, float("-inf"))
        lse_HQ = scores_HQL.logsumexp(-1)
        if sinks_H is not None:
            lse_HQ = torch.logaddexp(lse_HQ, sinks_H[:, None].to(dtype))
        weights_HQL = (scores_HQL - lse_HQ.unsqueeze(-1)).exp()
        out_THD[start:stop] = torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD)
    return out_THD.to(q_THD.dtype)
