"""Paged attention of the torch backend, over the groups of a plan.

The query heads that share a key/value head are packed into the query dimension, so that keys and
values are never repeated: q [G, K, Q * (H / K), D] against k [G, K, L, D]."""

import math

import torch
import torch.nn.functional as F

from kernels.interface.operations import AttentionParams
from kernels.interface.special_inputs import PositionScores
from kernels.torch.attention_planner import TileGroup

_MOST_ROWS_FOR_BMM = 16
"""Up to this many packed query rows two plain batched products beat the fused kernel (by 1.2-1.7
times at 3 rows); above it the fused kernel keeps the scores out of memory."""


class PagedAttention:
    """Runs planned attention. Holds buffers that grow to the largest group seen: fresh memory of
    that size would be returned to the system and faulted in again by every layer."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def run(
        self,
        q_THD: torch.Tensor,
        k_cache_BSKD: torch.Tensor,
        v_cache_BSKD: torch.Tensor,
        groups: tuple[TileGroup, ...],
        params: AttentionParams,
        positions: PositionScores | None = None,
    ) -> torch.Tensor:
        """See `Operations.paged_attention`."""
        is_plain = params.softcap is None and params.sinks_H is None
        is_plain = is_plain and params.alibi_slopes_H is None and params.distance_bias_HN is None
        is_plain = is_plain and positions is None
        num_kv_heads, head_size = k_cache_BSKD.shape[2:]
        value_size = v_cache_BSKD.shape[3]
        shape = *q_THD.shape[:2], value_size
        out_THD = torch.empty(shape, dtype=q_THD.dtype, device=q_THD.device)
        for group in groups:
            shape = (group.num_tiles, num_kv_heads, group.num_keys, head_size)
            k_GKLD = self._gather("keys", k_cache_BSKD, group).view(shape)
            if value_size == head_size:
                v_GKLD = self._gather("values", v_cache_BSKD, group).view(shape)
            else:  # they are in the keys
                v_GKLD = k_GKLD[..., -value_size:]
            q_GKND = _pack_queries(q_THD, group, num_kv_heads)
            if is_plain and q_GKND.shape[2] > _MOST_ROWS_FOR_BMM:
                o_GKND = F.scaled_dot_product_attention(
                    q_GKND, k_GKLD, v_GKLD, attn_mask=group.mask, scale=params.scale
                )
            else:
                o_GKND = self._attend(q_GKND, k_GKLD, v_GKLD, group, params, positions)
            o_NHD = _unpack_queries(o_GKND, group, q_THD.shape[1])
            if group.output_token is None:
                return o_NHD
            if group.output_index is not None:
                o_NHD = o_NHD.index_select(0, group.output_index)
            out_THD.index_copy_(0, group.output_token, o_NHD)
        return out_THD

    def _attend(
        self,
        q_GKND: torch.Tensor,
        k_GKLD: torch.Tensor,
        v_GKLD: torch.Tensor,
        group: TileGroup,
        params: AttentionParams,
        positions: PositionScores | None,
    ) -> torch.Tensor:
        """Two batched products with the softmax in float32 between them."""
        num_tiles, num_kv_heads, num_rows, _ = q_GKND.shape
        num_keys = k_GKLD.shape[2]
        scores = self._buffer("scores", (num_tiles * num_kv_heads, num_rows, num_keys), q_GKND)
        torch.bmm(
            (q_GKND * params.scale).flatten(0, 1), k_GKLD.flatten(0, 1).transpose(1, 2), out=scores
        )
        scores_GKNL = scores.view(num_tiles, num_kv_heads, num_rows, num_keys).float()
        if params.softcap is not None:
            scores_GKNL.div_(params.softcap).tanh_().mul_(params.softcap)
        if params.alibi_slopes_H is not None:
            scores_GKNL += _alibi(group, params.alibi_slopes_H.view(num_kv_heads, -1))
        if params.distance_bias_HN is not None:
            scores_GKNL += _distance_bias(group, params.distance_bias_HN, num_kv_heads)
        if positions is not None:
            scores_GKNL += _position_scores(group, positions, num_kv_heads)
        if group.mask is not None:
            scores_GKNL += group.mask
        if params.sinks_H is not None:  # one more key, whose value is zero
            sinks_K1H = params.sinks_H.view(num_kv_heads, 1, -1).expand(-1, group.num_queries, -1)
            sinks_GKN1 = sinks_K1H.reshape(1, num_kv_heads, num_rows, 1).expand(
                num_tiles, -1, -1, -1
            )
            scores_GKNL = torch.cat((scores_GKNL, sinks_GKN1), dim=-1)
        weights_GKNL = torch.softmax(scores_GKNL, dim=-1)[..., :num_keys].to(q_GKND.dtype)
        return torch.bmm(weights_GKNL.flatten(0, 1), v_GKLD.flatten(0, 1)).view(
            num_tiles, num_kv_heads, num_rows, -1
        )

    def _gather(self, name: str, cache_BSKD: torch.Tensor, group: TileGroup) -> torch.Tensor:
        """Heads of keys or values, wherever blocks lie, are rows of one view, `unit` elements from
        one to the next."""
        num_blocks, *_, head_size = cache_BSKD.shape
        block_stride, block_elements = cache_BSKD.stride(0), cache_BSKD[0].numel()
        unit = math.gcd(block_stride, head_size)
        num_rows = ((num_blocks - 1) * block_stride + block_elements - head_size) // unit + 1
        rows_ND = cache_BSKD.as_strided((num_rows, head_size), (unit, 1))
        rows = group.rows_in(block_elements // head_size, block_stride // unit, head_size // unit)
        out = self._buffer(name, (rows.shape[0], head_size), cache_BSKD)
        torch.index_select(rows_ND, 0, rows, out=out)
        return out

    def _buffer(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        size = math.prod(shape)
        buffer = self._buffers.get((name, like.dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[name, like.dtype] = buffer
        return buffer[:size].view(shape)


def _alibi(group: TileGroup, slopes_KH: torch.Tensor) -> torch.Tensor:
    """`slope * (key position - query position)`, [G, K, Q * (H / K), L]."""
    distance_GQL = _distances(group).float()
    bias_GKQHL = distance_GQL[:, None, :, None] * slopes_KH[None, :, None, :, None]
    return bias_GKQHL.flatten(2, 3)


def _distance_bias(group: TileGroup, bias_HN: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """`bias[key position - query position]`, [G, K, Q * (H / K), L]."""
    reach = bias_HN.shape[1] // 2
    place_GQL = _distances(group).clamp(-reach, reach) + reach
    shape = num_kv_heads, len(bias_HN) // num_kv_heads, *place_GQL.shape
    return bias_HN[:, place_GQL].view(shape).permute(2, 0, 3, 1, 4).flatten(2, 3)


def _position_scores(
    group: TileGroup, positions: PositionScores, num_kv_heads: int
) -> torch.Tensor:
    """See `PositionScores`, [G, K, Q * (H / K), L]."""
    of_query_HTB, of_key_HTB = torch.stack([*positions.queries]), torch.stack([*positions.keys])
    num_heads, num_tokens, _ = of_query_HTB.shape
    tokens = torch.arange(num_tokens) if group.query_index is None else group.query_index
    query_GQ1 = tokens.view(group.num_tiles, group.num_queries, 1)
    distance_GQL = _distances(group)
    key_G1L = (query_GQ1 + distance_GQL)[:, :1].clamp(0, num_tokens - 1)
    reach = positions.reach
    bucket_GQL = positions.buckets_N[distance_GQL.clamp(-reach, reach) + reach].long()
    scores_HGQL = of_query_HTB[:, query_GQ1, bucket_GQL] + of_key_HTB[:, key_G1L, bucket_GQL]
    shape = num_kv_heads, num_heads // num_kv_heads, *bucket_GQL.shape
    return scores_HGQL.view(shape).permute(2, 0, 3, 1, 4).flatten(2, 3)


def _distances(group: TileGroup) -> torch.Tensor:
    """Key position - query position, int64 [G, Q, L]."""
    first_G = torch.tensor(group.first_distances, dtype=torch.int64)
    steps_QL = torch.arange(group.num_keys) - torch.arange(group.num_queries).unsqueeze(1)
    return first_G[:, None, None] + steps_QL


def _pack_queries(q_THD: torch.Tensor, group: TileGroup, num_kv_heads: int) -> torch.Tensor:
    q_NHD = q_THD if group.query_index is None else q_THD.index_select(0, group.query_index)
    num_heads, head_size = q_THD.shape[1:]
    heads_per_kv = num_heads // num_kv_heads
    packed = q_NHD.reshape(
        group.num_tiles, group.num_queries, num_kv_heads, heads_per_kv, head_size
    ).transpose(1, 2)
    return packed.reshape(group.num_tiles, num_kv_heads, -1, head_size)


def _unpack_queries(o_GKND: torch.Tensor, group: TileGroup, num_heads: int) -> torch.Tensor:
    num_tiles, num_kv_heads, _, head_size = o_GKND.shape
    split = o_GKND.reshape(num_tiles, num_kv_heads, group.num_queries, -1, head_size)
    return split.transpose(1, 2).reshape(-1, num_heads, head_size)
