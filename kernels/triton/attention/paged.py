"""Paged attention of a step: its decodes, then its prefills."""

import torch

from kernels.interface.operations import AttentionMetadata, AttentionParams
from kernels.interface.special_inputs import PositionScores
from kernels.triton.attention.call import AttentionCall
from kernels.triton.attention.decode import decode_attention
from kernels.triton.attention.latent import latent_attention
from kernels.triton.attention.prefill import prefill_attention
from kernels.triton.attention.work import AttentionWork


def paged_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    metadata: AttentionMetadata,
    params: AttentionParams,
    positions: PositionScores | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of this step's tokens over the cache, which already holds their k and v.

    For the query at position i and each key at position j <= i (and j > i - sliding_window):

        score_ij = softcap(scale * q_i . k_j) + slope_h * (j - i)
        lse_i    = log(sum_j exp(score_ij) + exp(sink_h))
        out_i    = sum_j exp(score_ij - lse_i) * v_j

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
            float8_e4m3fn. D contiguous. Narrower values are in the keys, see `latent`.
        metadata: its `plan` is the `AttentionWork` of `AttentionWorkspace.plan`, made with the same
            window and head counts.
        params: scale and softcap above 0.
        positions: None: they are for a CPU.
        out: written in place and returned if given, [T, H, D] of q's dtype, D contiguous; must not
            share memory with q. Rows of tokens that belong to no request stay as they are.
    """
    work = metadata.plan
    if not isinstance(work, AttentionWork):
        raise TypeError(
            f"the plan is a {type(work).__name__}; make it with AttentionWorkspace.plan"
        )
    if positions is not None:
        raise ValueError("scores of positions are for a CPU; give --device cpu")
    if out is None:
        shape = (*q_THD.shape[:2], v_cache.shape[3])
        out = torch.empty(shape, dtype=q_THD.dtype, device=q_THD.device)
    if v_cache.shape[3] != k_cache.shape[3]:  # values are in the keys
        return latent_attention(q_THD, k_cache, metadata.block_table_RM, work, params, out)

    caches = k_cache, v_cache, metadata.block_table_RM
    call = AttentionCall(q_THD, *caches, work, params, out)
    if work.has_decodes:
        decode_attention(call)
    if work.max_tiles:
        prefill_attention(call)
    if not (work.has_decodes or work.max_tiles):
        call.check()
    return out
