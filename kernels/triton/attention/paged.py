"""Paged attention: the formula, the checks, the launches for decodes and prefills."""

import torch

from kernels.interface.operations import AttentionMetadata, AttentionParams
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.work import AttentionWork
from kernels.triton.tensor_checks import check_tensor

_KV_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn)


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of this step's tokens over the cache, which already holds their k and v.

    For the query at position i and each key at position j <= i (and j > i - sliding_window):

        score_ij = softcap(scale * k_scale * q_i . k_j) + slope_h * (j - i)
        lse_i    = log(sum_j exp(score_ij) + exp(sink_h))
        out_i    = v_scale * sum_j exp(score_ij - lse_i) * v_j

    with `softcap(x) = softcap * tanh(x / softcap)`. Query head h reads key/value head
    h // (H / K). Decodes are launched over splits of their keys and joined in a fixed order,
    prefills over tiles; a request's rows do not depend, bit for bit, on what else is in the step.
    Sources: PagedAttention (Kwon et al. 2023), FlashAttention-2 (Dao 2023), Flash-Decoding (Dao,
    Haziza, Massa, Sizov 2023).

    Safe to capture in a CUDA graph: nothing waits, and grids depend on host numbers of
    `metadata.plan` alone. With a new step's lists in the same workspace the graph replays.
    Returns out_THD.

    Args:
        q_THD: D contiguous. H must be a multiple of K.
        k_cache, v_cache: `kv[:, 0]` and `kv[:, 1]` of [B, 2, K, S, D]; of q's dtype or
            float8_e4m3fn. D contiguous.
        metadata: its `plan` is the `AttentionWork` of `AttentionWorkspace.plan`, made with the same
            window and head counts.
        params: scale and softcap above 0.
        out: written in place and returned if given, [T, H, D] of q's dtype, D contiguous; must not
            share memory with q. Rows of tokens that belong to no request stay as they are.
        lse_TH: float32, written if given, heads contiguous.
    """
    work = metadata.plan
    if not isinstance(work, AttentionWork):
        raise TypeError(
            f"the plan is a {type(work).__name__}; make it with AttentionWorkspace.plan"
        )
    if out is None:
        out = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)

    def check() -> None:
        _check(q_THD, k_cache, v_cache, work, params)
        device, (T, H) = q_THD.device, q_THD.shape[:2]
        for name, numbers_H in (
            ("sinks_H", params.sinks_H),
            ("alibi_slopes_H", params.alibi_slopes_H),
        ):
            if numbers_H is not None:
                check_tensor(name, numbers_H, (H,), torch.float32, device)
        table_RM = metadata.block_table_RM[: work.num_requests]  # it may have more rows
        shape = (work.num_requests, table_RM.shape[-1])
        check_tensor("block_table_RM", table_RM, shape, torch.int32, device, contiguous_dims=1)
        check_tensor("out", out, q_THD.shape, q_THD.dtype, device, contiguous_dims=1)
        if lse_TH is not None:
            check_tensor("lse_TH", lse_TH, (T, H), torch.float32, device, contiguous_dims=1)

    tables = (q_THD, k_cache, v_cache, metadata.block_table_RM, work, params, out, lse_TH)
    if work.has_decodes:
        decode_attention(*tables, check, k_scale=k_scale, v_scale=v_scale)
    if work.max_tiles:
        prefill_attention(*tables, check, k_scale=k_scale, v_scale=v_scale)
    if not (work.has_decodes or work.max_tiles):
        check()
    return out


def _check(
    q_THD: torch.Tensor,
    k_cache_BKSD: torch.Tensor,
    v_cache_BKSD: torch.Tensor,
    work: AttentionWork,
    params: AttentionParams,
) -> None:
    scale, sliding_window, softcap = params.scale, params.sliding_window, params.softcap
    if q_THD.dim() != 3 or k_cache_BKSD.dim() != 4 or k_cache_BKSD.shape != v_cache_BKSD.shape:
        raise ValueError(
            f"q is {tuple(q_THD.shape)}, caches {tuple(k_cache_BKSD.shape)} and"
            f" {tuple(v_cache_BKSD.shape)}; give [T, H, D] and two [B, K, S, D]"
        )
    num_kv_heads, block_size, head_size = k_cache_BKSD.shape[1:]
    if (work.num_query_heads, work.num_kv_heads) != (q_THD.shape[1], num_kv_heads):
        raise ValueError(
            f"{q_THD.shape[1]} query and {num_kv_heads} key/value heads, but the plan was made for"
            f" {work.num_query_heads} and {work.num_kv_heads}; use the workspace of this layer"
        )
    if q_THD.shape[2] != head_size or head_size > 256:
        raise ValueError(
            f"head size {q_THD.shape[2]} of q, {head_size} of the cache; they must be equal and at"
            " most 256"
        )
    if block_size & (block_size - 1):
        raise ValueError(f"block size {block_size} is not a power of two; allocate 16 to 128 slots")
    if q_THD.stride(2) != 1 or k_cache_BKSD.stride(3) != 1:
        raise ValueError("the elements of a head are not contiguous; give q and caches so")
    if k_cache_BKSD.stride() != v_cache_BKSD.stride():
        raise ValueError(
            f"strides {k_cache_BKSD.stride()} of keys, {v_cache_BKSD.stride()} of values; give both"
            " of one cache"
        )
    if k_cache_BKSD.dtype != v_cache_BKSD.dtype or k_cache_BKSD.dtype not in _KV_DTYPES:
        raise TypeError(f"caches are {k_cache_BKSD.dtype} and {v_cache_BKSD.dtype}")
    if q_THD.dtype not in _KV_DTYPES[:3] or k_cache_BKSD.dtype not in (q_THD.dtype, _KV_DTYPES[3]):
        raise TypeError(
            f"q is {q_THD.dtype}, the cache {k_cache_BKSD.dtype}; give one of float16, bfloat16,"
            " float32, and a cache of that dtype or float8_e4m3fn"
        )
    if sliding_window != work.sliding_window:
        raise ValueError(
            f"sliding window {sliding_window}, but the plan was made for {work.sliding_window};"
            " use the workspace of this layer"
        )
    if not scale > 0 or (softcap is not None and not softcap > 0):
        raise ValueError(f"scale {scale} and softcap {softcap} must be above 0")
    if q_THD.device != k_cache_BKSD.device or work.splits_W8.device != q_THD.device:
        raise ValueError(
            f"q is on {q_THD.device}, the cache on {k_cache_BKSD.device}, the plan on"
            f" {work.splits_W8.device}; give one device"
        )
    numbers = work.num_scratch_rows * head_size
    if work.partial_out.numel() < numbers:
        raise ValueError(
            f"scratch of {work.partial_out.numel()} numbers, {numbers} are needed; make"
            f" the workspace for head size {head_size}"
        )
