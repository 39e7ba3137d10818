"""Recurrent layers of the torch backend: the specification, a token at a time."""

from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F

from kernels.interface.operations import AttentionMetadata, AttentionPlanner, AttentionSpec
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)


def state_spec(block_size: int) -> AttentionSpec:
    """What a planner of layers with states is told: they have no heads of keys, and no limits."""
    return AttentionSpec(
        num_query_heads=1,
        num_kv_heads=1,
        head_size=1,
        block_size=block_size,
        sliding_window=None,
        max_num_seqs=0,
        max_num_batched_tokens=0,
        max_model_len=0,
        dtype=torch.float32,
        kv_dtype=torch.float32,
    )


class StatePlanner(AttentionPlanner):
    """Plans steps of layers with states: they read the tensors of a step alone."""

    def __init__(self, block_size: int) -> None:
        super().__init__(state_spec(block_size))

    def _plan_work(
        self, step: AttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> object:
        return None


def convolve(
    x_TC: torch.Tensor,
    params: ConvolutionParams,
    cache: RecurrentCache,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """See `Operations.convolve`."""
    out_TC, size = x_TC.new_empty(x_TC.shape), metadata.block_size
    num_before = len(params.weight_WC) - 1
    for table, start, tokens in _requests(metadata):
        first, end = start // size, start + tokens.stop - tokens.start
        if start % size:
            begin, before_VC = first, cache.tails_BVC[table[first]]
            kept_XC = cache.inputs_BSC[table[first], : start % size]
        elif first:
            begin, before_VC = first - 1, cache.tails_BVC[table[first - 1]]
            kept_XC = cache.inputs_BSC[table[first - 1]]
        else:
            begin, before_VC = 0, torch.zeros_like(cache.tails_BVC[0])
            kept_XC = cache.inputs_BSC[0, :0]
        inputs_XC = torch.cat([before_VC, kept_XC, x_TC[tokens]])
        offset = begin * size - num_before  # the position of the first of them
        for block in range(first, -(-end // size)):
            if table[block]:
                low, high = max(start, block * size), min(end, (block + 1) * size)
                at = block * size - offset
                cache.tails_BVC[table[block]] = inputs_XC[at - num_before : at]
                kept = slice(low - block * size, high - block * size)
                cache.inputs_BSC[table[block], kept] = inputs_XC[low - offset : high - offset]
        seen_XC = inputs_XC[start - offset - num_before :].float()
        sum_TC = torch.zeros(end - start, x_TC.shape[1])
        if params.bias_C is not None:
            sum_TC += params.bias_C
        for tap, weight_C in enumerate(params.weight_WC):
            sum_TC += seen_XC[tap : tap + end - start] * weight_C
        out_TC[tokens] = (F.silu(sum_TC) if params.silu else sum_TC).to(out_TC.dtype)
    return out_TC


def recur(
    qkv_TC: torch.Tensor,
    a_TN: torch.Tensor | None,
    b_TH: torch.Tensor | None,
    params: RecurrenceParams,
    cache: RecurrentCache,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """See `Operations.recur`."""
    shape, size = params.shape, metadata.block_size
    num_shared, num_tokens = shape.num_heads // shape.num_key_heads, len(qkv_TC)
    heads = (shape.num_key_heads, shape.num_key_heads, shape.num_heads)
    sizes = (shape.key_size, shape.key_size, shape.value_size)
    q_TKN, k_TKN, v_THP = (
        qkv_TC[:, start : start + number * width].float().reshape(num_tokens, number, width)
        for start, number, width in zip(params.starts, heads, sizes, strict=True)
    )
    if params.normed:
        q_TKN, k_TKN = _normed(q_TKN), _normed(k_TKN)
    q_THN = (q_TKN * params.q_scale).repeat_interleave(num_shared, 1)
    steps_THD = torch.ones(num_tokens, shape.num_heads, 1)
    if params.bias_HD is not None:
        assert a_TN is not None
        steps_THD = F.softplus(
            a_TN.float().reshape(num_tokens, shape.num_heads, -1) + params.bias_HD
        )
    log_decay_THD = -params.rate_H[:, None] * steps_THD
    share_TH1 = torch.ones(num_tokens, shape.num_heads, 1)
    if params.rule == "delta":
        assert b_TH is not None
        share_TH1 = b_TH.float().sigmoid()[..., None]
    elif params.rule == "discretised":
        share_TH1 = steps_THD
    out_THP = torch.empty_like(v_THP)
    for table, start, tokens in _requests(metadata):
        block, filled = divmod(start, size)
        rows = _Rows(cache, table[block] if filled else 0, num_shared)
        state_HNP = torch.zeros_like(cache.states_BHNP[0])
        if filled:
            state_HNP = cache.states_BHNP[table[block]].clone()
        elif block:
            before = _Rows(cache, table[block - 1], num_shared)
            state_HNP = before.closed(cache.states_BHNP[table[block - 1]])
        first = filled
        for token in range(tokens.start, tokens.stop):
            rows.keys_SKN[filled] = k_TKN[token]
            rows.sums_SHD[filled] = log_decay_THD[token]
            if filled:
                rows.sums_SHD[filled] += rows.sums_SHD[filled - 1]
            shares_IHD = (rows.sums_SHD[filled] - rows.sums_SHD[: filled + 1]).exp()
            keys_IHN = rows.leading_keys(filled + 1)
            decay_HD = rows.sums_SHD[filled].exp()
            u_HP = v_THP[token]
            if params.rule == "delta":
                key_HN = keys_IHN[filled]
                weights_IH = (shares_IHD * keys_IHN * key_HN).sum(-1)[:filled, :, None]
                u_HP = u_HP - _times(decay_HD * key_HN, state_HNP)
                u_HP = u_HP - (weights_IH * rows.updates_SHP[:filled]).sum(0)
            rows.updates_SHP[filled] = share_TH1[token] * u_HP
            filled += 1
            weights_IH = (shares_IHD * keys_IHN * q_THN[token]).sum(-1)[..., None]
            from_rows_HP = (weights_IH * rows.updates_SHP[:filled]).sum(0)
            out_THP[token] = _times(decay_HD * q_THN[token], state_HNP) + from_rows_HP
            if filled == size or token + 1 == tokens.stop:
                if table[block]:
                    cache.states_BHNP[table[block]] = state_HNP
                    rows.write(cache, table[block], first, filled)
                if filled == size and token + 1 < tokens.stop:
                    state_HNP = rows.closed(state_HNP)
                    block, filled, first = block + 1, 0, 0
    if params.skip_H is not None:
        out_THP += params.skip_H[:, None] * v_THP
    return out_THP.flatten(1).to(qkv_TC.dtype)


class _Rows:
    """A copy of a block's rows."""

    def __init__(self, cache: RecurrentCache, block: int, num_shared: int) -> None:
        self.keys_SKN = cache.keys_BSKN[block].clone()
        self.updates_SHP = cache.updates_BSHP[block].clone()
        self.sums_SHD = cache.decays_BSHD[block].clone()
        self._num_shared = num_shared

    def leading_keys(self, number: int) -> torch.Tensor:
        """Keys of the first rows, a head of values."""
        return self.keys_SKN[:number].repeat_interleave(self._num_shared, 1)

    def closed(self, state_HNP: torch.Tensor) -> torch.Tensor:
        """The state behind all rows, from that before them."""
        last_HD = self.sums_SHD[-1]
        shares_SHD = (last_HD - self.sums_SHD).exp()
        keys_SHN = self.leading_keys(len(self.keys_SKN))
        added_HNP = torch.einsum("shp,shn->hnp", self.updates_SHP, shares_SHD * keys_SHN)
        return last_HD.exp()[..., None] * state_HNP + added_HNP

    def write(self, cache: RecurrentCache, block: int, first: int, stop: int) -> None:
        """Keep rows from `first` to `stop`."""
        cache.keys_BSKN[block, first:stop] = self.keys_SKN[first:stop]
        cache.updates_BSHP[block, first:stop] = self.updates_SHP[first:stop]
        cache.decays_BSHD[block, first:stop] = self.sums_SHD[first:stop]


def gated_norm(x_TN: torch.Tensor, gate_TN: torch.Tensor, params: GatedNormParams) -> torch.Tensor:
    """See `Operations.gated_norm`."""
    gate_TGS, x_TGS = (
        each_TN.float().reshape(len(x_TN), -1, params.size) for each_TN in (gate_TN, x_TN)
    )
    gate_TGS = F.silu(gate_TGS) if params.activation == "silu" else gate_TGS.sigmoid()
    if params.gate_first:
        x_TGS = x_TGS * gate_TGS
    x_TGS = x_TGS * torch.rsqrt(x_TGS.square().mean(-1, keepdim=True) + params.eps)
    x_TGS = x_TGS * params.weight_N.float().view(-1, params.size)
    if not params.gate_first:
        x_TGS = x_TGS * gate_TGS
    x_TGAS = x_TGS.reshape(len(x_TN), -1, params.transposed, params.size)
    return x_TGAS.transpose(1, 2).flatten(1).to(x_TN.dtype)


def gate(
    x_TN: torch.Tensor, gate_TN: torch.Tensor, activation: Literal["sigmoid"] | None
) -> torch.Tensor:
    """See `Operations.gate`."""
    if activation is None:
        return x_TN * gate_TN
    return (x_TN.float() * gate_TN.float().sigmoid()).to(x_TN.dtype)


def _normed(x_TKN: torch.Tensor) -> torch.Tensor:
    return x_TKN * torch.rsqrt(x_TKN.square().sum(-1, keepdim=True) + 1e-6)


def _times(x_HN: torch.Tensor, state_HNP: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x_HN[:, None], state_HNP)[:, 0]


def _requests(metadata: AttentionMetadata) -> Iterator[tuple[list[int], int, slice]]:
    """Block table, first position and place in the step of each request that has tokens in it."""
    starts, tables = metadata.query_start_loc_R1.tolist(), metadata.block_table_RM.tolist()
    for r, length in enumerate(metadata.seq_lens_R.tolist()):
        if (num_tokens := starts[r + 1] - starts[r]) > 0:
            yield tables[r], length - num_tokens, slice(starts[r], starts[r + 1])
