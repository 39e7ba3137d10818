"""Paged attention over [B, K, S, D] caches as its definition reads: a loop over requests, float32.

The specification of the attention kernels of this folder, with every option that they have. Must
not be used for serving.
"""

from __future__ import annotations

import torch


def reference_paged_attention(
    q_THD: torch.Tensor,
    k_cache_BKSD: torch.Tensor,
    v_cache_BKSD: torch.Tensor,
    *,
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    block_table_RM: torch.Tensor,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each request's last tokens over its cached keys and values.

    For the query at position i and the key at position j <= i (and j > i - sliding_window):

        score_ij = softcap(scale * q_i . (k_scale * k_j)) + slope * (j - i)
        lse_i    = log(sum_j exp(score_ij) + exp(sink))
        out_i    = sum_j exp(score_ij - lse_i) * v_scale * v_j

    A query without any visible key gives zero.

    Returns:
        out_THD and lse_TH, both float32.
    """
    num_tokens, num_heads, _ = q_THD.shape
    group_size = num_heads // k_cache_BKSD.shape[1]
    out_THD = torch.zeros(q_THD.shape, dtype=torch.float32)
    lse_TH = torch.zeros(num_tokens, num_heads)
    starts = query_start_loc_R1.tolist()
    for request, length in enumerate(seq_lens_R.tolist()):
        start, stop = starts[request], starts[request + 1]
        k_HLD = _gather(k_cache_BKSD, block_table_RM[request], length, group_size) * k_scale
        v_HLD = _gather(v_cache_BKSD, block_table_RM[request], length, group_size) * v_scale
        scores_HQL = scale * torch.einsum("qhd,hld->hql", q_THD[start:stop].float(), k_HLD)
        if softcap is not None:
            scores_HQL = softcap * torch.tanh(scores_HQL / softcap)
        key_L = torch.arange(length)
        query_Q1 = torch.arange(length - (stop - start), length).unsqueeze(1)
        if alibi_slopes_H is not None:
            scores_HQL = scores_HQL + alibi_slopes_H.float()[:, None, None] * (key_L - query_Q1)
        visible_QL = key_L <= query_Q1
        if sliding_window is not None:
            visible_QL &= key_L > query_Q1 - sliding_window
        scores_HQL = scores_HQL.masked_fill(~visible_QL, float("-inf"))
        lse_HQ = torch.logsumexp(scores_HQL, dim=-1)
        if sinks_H is not None:
            lse_HQ = torch.logaddexp(lse_HQ, sinks_H.float()[:, None].expand_as(lse_HQ))
        weights_HQL = (scores_HQL - lse_HQ.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
        out_THD[start:stop] = torch.einsum("hql,hld->qhd", weights_HQL, v_HLD)
        lse_TH[start:stop] = lse_HQ.T
    return out_THD, lse_TH


def _gather(
    cache_BKSD: torch.Tensor, blocks_M: torch.Tensor, length: int, group_size: int
) -> torch.Tensor:
    """The first `length` slots of a request, [H, L, D] in float32."""
    used = -(-length // cache_BKSD.shape[2])
    blocks_MKSD = cache_BKSD[blocks_M[:used].long()].float()
    rows_KLD = blocks_MKSD.permute(1, 0, 2, 3).flatten(1, 2)[:, :length]
    return rows_KLD.repeat_interleave(group_size, dim=0)
