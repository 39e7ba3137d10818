"""Paged attention as its definition reads: a loop over requests, float32, no cleverness.

The specification that every fast attention is tested against. Must not be used for serving.
"""

from __future__ import annotations

import torch

from kernels.interface.operations import AttentionMetadata


def reference_paged_attention(
    q_THD: torch.Tensor,
    k_cache_BSKD: torch.Tensor,
    v_cache_BSKD: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """`softmax(softcap(scale * q k) + bias + mask) v` for each request, see `Operations`."""
    out_THD = torch.empty_like(q_THD)
    group_size = q_THD.shape[1] // k_cache_BSKD.shape[2]
    starts = metadata.query_start_loc_R1.tolist()
    for request, length in enumerate(metadata.seq_lens_R.tolist()):
        start, stop = starts[request], starts[request + 1]
        blocks_M = metadata.block_table_RM[request].long()
        k_LHD = k_cache_BSKD[blocks_M].flatten(0, 1)[:length].float()
        v_LHD = v_cache_BSKD[blocks_M].flatten(0, 1)[:length].float()
        k_LHD = k_LHD.repeat_interleave(group_size, dim=1)
        v_LHD = v_LHD.repeat_interleave(group_size, dim=1)
        scores_HQL = scale * torch.einsum("qhd,lhd->hql", q_THD[start:stop].float(), k_LHD)
        if softcap is not None:
            scores_HQL = softcap * torch.tanh(scores_HQL / softcap)
        key_L = torch.arange(length)
        query_Q1 = torch.arange(length - (stop - start), length).unsqueeze(1)
        if alibi_slopes_H is not None:
            scores_HQL = scores_HQL + alibi_slopes_H[:, None, None] * (key_L - query_Q1)
        visible_QL = key_L <= query_Q1
        if sliding_window is not None:
            visible_QL &= key_L > query_Q1 - sliding_window
        scores_HQL = scores_HQL.masked_fill(~visible_QL, float("-inf"))
        if sinks_H is not None:
            sinks_HQ1 = sinks_H[:, None, None].expand(-1, stop - start, 1)
            scores_HQL = torch.cat((scores_HQL, sinks_HQ1), dim=-1)
        weights_HQL = scores_HQL.softmax(-1)[..., :length]
        out_THD[start:stop] = torch.einsum("hql,lhd->qhd", weights_HQL, v_LHD).to(q_THD.dtype)
    return out_THD
