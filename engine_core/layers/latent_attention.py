"""Latent attention (MLA, arXiv:2405.04434): all heads' keys and values are made of one vector of
each token, and that vector alone is cached.

    c = norm(x W_DKV)   r = rotated(x W_KR)          cached: [r, c]
    k = [c W_UK, r]     v = c W_UV                   of each head
    q k = [q_nope W_UK^T, q_rope] [c, r]             so c itself is attended, by all heads,
    out = (weights c) W_UV                           and W_UK, W_UV act on queries and results

A prompt takes the same way as a decode, so a token's bits do not depend on how its sequence was
cut into steps.
"""

from collections.abc import Sequence

import torch

from engine_core.layers.attention import scaled
from engine_core.layers.config import LatentConfig, QueryScale
from engine_core.layers.indexer import Indexer
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import (
    CopyWeight,
    PackedPlacement,
    Placement,
    Placements,
    merge,
)
from kernels.interface.operations import (
    Activations,
    AttentionParams,
    ForwardContext,
    Operations,
    RotaryParams,
    RoundedRows,
)
from kernels.interface.weights import LinearWeight, QuantisedTensor, WeightPart


class HeadProducts:
    """A product of each head, whose weights lie below each other: [H * N, E].

    Args:
        shape: (N, E).
    """

    def __init__(
        self,
        name: str,
        num_heads: int,
        shape: tuple[int, int],
        *,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        self._name = name
        self._num_heads = num_heads
        self._shape = shape
        self._dtype = dtype
        self._ops = ops
        self._packing = ops.weight_packing(dtype)
        self._weights: list[LinearWeight] = []

    def placements(self) -> Placements:
        """The one tensor that it takes."""
        shape = (self._num_heads * self._shape[0], self._shape[1])
        store = (
            PackedPlacement(shape, self._pack) if self._packing else Placement(shape, self._store)
        )
        return {f"{self._name}.weight": store}

    def __call__(self, heads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs of each head [T, E] -> its outputs [T, N]."""
        assert self._weights, f"{self._name} was not loaded"
        pairs = zip(heads, self._weights, strict=True)
        return [self._ops.linear(x_TE, weight) for x_TE, weight in pairs]

    def _pack(self, part: WeightPart) -> None:
        assert self._packing is not None
        if isinstance(part, QuantisedTensor) and not part.has_rows:
            part = part.dequantise()
        for head in range(self._num_heads):
            rows_N = torch.arange(head * self._shape[0], (head + 1) * self._shape[0])
            own = part.rows(rows_N) if isinstance(part, QuantisedTensor) else part[rows_N]
            self._weights.append(self._packing.pack(f"{self._name}.{head}", [own]))

    def _store(self, tensor: torch.Tensor, copy: CopyWeight) -> None:
        weight = torch.empty(tensor.shape, dtype=self._dtype, device=self._ops.device)
        copy(weight, tensor)
        for own_NE in weight.view(self._num_heads, *self._shape):
            self._weights.append(self._ops.prepare_linear(own_NE))


class LatentAttention:
    """See the module. The rotary part of a head comes first, so that it turns as any head does.

    Args:
        layer: index into the context's caches and metadata.
        name: of the layer's attention in checkpoints.
        norms: of the latent of queries, where they have one, and of that of keys and values.
        output: takes all heads' values.
        indexer: chooses the keys that are attended; None: all are.
        chooses: whether the indexer is the layer's own; else it is one of a layer before.
    """

    def __init__(
        self,
        layer: int,
        name: str,
        config: LatentConfig,
        num_inputs: int,
        *,
        norms: Sequence[RMSNorm],
        output: FusedLinear,
        rotary: RotaryParams,
        params: AttentionParams,
        query_scale: QueryScale | None,
        dtype: torch.dtype,
        ops: Operations,
        indexer: Indexer | None = None,
        chooses: bool = False,
    ) -> None:
        self._indexer = indexer
        self._chooses = chooses
        self._layer = layer
        self._query_scale = query_scale
        self._config = config
        *self._query_norm, self._norm = norms
        self._rotary = rotary
        self._params = params
        num_heads, rank = config.num_heads, config.rank
        q_width = num_heads * (config.nope_size + config.rope_size)
        first = ("q_proj", q_width)
        if config.query_rank is not None:
            first = ("q_a_proj", config.query_rank)
        own = ("kv_a_proj_with_mqa", rank + config.rope_size)
        self._first = FusedLinear(
            [(f"{name}.{part}", size) for part, size in (first, own)],
            num_inputs,
            bias=False,
            dtype=dtype,
            ops=ops,
        )
        self._sizes = [first[1], rank, config.rope_size]
        self._queries = [
            FusedLinear([(f"{name}.q_b_proj", q_width)], each, bias=False, dtype=dtype, ops=ops)
            for each in (config.query_rank,)
            if each is not None
        ]
        self._absorb, self._expand = (
            HeadProducts(f"{name}.{part}", num_heads, shape, dtype=dtype, ops=ops)
            for part, shape in (
                ("k_b_proj", (rank, config.nope_size)),
                ("v_b_proj", (config.value_size, rank)),
            )
        )
        self._output = output

    @property
    def first(self) -> FusedLinear | None:
        return None if self._chooses else self._first

    @property
    def linears(self) -> list[FusedLinear]:
        own = self._indexer.linears if self._indexer is not None and self._chooses else []
        return [self._first, *self._queries, *own, self._output]

    def placements(self) -> Placements:
        norms = [norm.placements() for norm in (*self._query_norm, self._norm)]
        products = [linear.placements() for linear in (self._first, *self._queries, self._output)]
        if self._indexer is not None and self._chooses:
            products.append(self._indexer.placements())
        return merge([*products, self._absorb.placements(), self._expand.placements(), *norms])

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The first half: [T, E] -> q_THD, which attend latents; writes those of the tokens. Of an
        indexer also what it chooses by, or what one before chose."""
        config = self._config
        c_TN, latent_TL, rope_TD = self._first(x_TE).split(self._sizes, 1)  # type: ignore[no-untyped-call]
        q_TN = c_TN
        for norm, product in zip(self._query_norm, self._queries, strict=True):
            c_TN = norm(c_TN)
            q_TN = product(c_TN)
        sizes = [config.nope_size] * config.num_heads + [config.rope_size] * config.num_heads
        parts = q_TN.split(sizes, 1)
        absorbed = self._absorb(parts[: config.num_heads])
        heads = zip(parts[config.num_heads :], absorbed, strict=True)
        rows = [part for head in heads for part in head]
        q_THD = context.ops.rotary_and_cache(
            torch.cat([*rows, rope_TD, self._norm(latent_TL)], 1),
            positions_T,
            context.metadata[self._layer].slot_mapping_T,
            context.kv_caches[self._layer],
            self._rotary,
        )
        q_THD = scaled(q_THD, positions_T, self._query_scale)
        if self._indexer is None:
            return q_THD
        if not self._chooses:
            return q_THD, self._indexer.chosen_TK
        assert not isinstance(x_TE, RoundedRows), "rounded for no product"
        return q_THD, *self._indexer.begin(x_TE, c_TN, positions_T, context)

    def finish(
        self, begun: torch.Tensor | tuple[torch.Tensor, ...], context: ForwardContext
    ) -> torch.Tensor:
        """The second: what `begin` gave -> [T, E]; reads latents."""
        kv, metadata = context.kv_caches[self._layer], context.metadata[self._layer]
        if isinstance(begun, tuple):
            q_THD, chosen_TK = begun[:2]
            if self._indexer is not None and self._chooses:
                chosen_TK = self._indexer.choose(begun[1], begun[2], context)
            out_THL = context.ops.attend_chosen(q_THD, kv, metadata, self._params, chosen_TK)
        else:
            out_THL = context.ops.paged_attention(begun, *kv.parts, metadata, self._params)
        heads = out_THL.flatten(1).split([self._config.rank] * self._config.num_heads, 1)  # type: ignore[no-untyped-call]
        return self._output(torch.cat(self._expand(heads), 1))
