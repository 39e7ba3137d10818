"""Attention to content and to distance apart (DeBERTa, arXiv:2006.03654): to `q_i k_j` come `q_i`
times a vector of the distance of i and j, and `k_j` times another one."""

from typing import Any

import torch

from engine_core.layers.attention import Attention
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import LayerNorm, RMSNorm
from engine_core.layers.parameters import Parameter, Placements, merge
from kernels.interface.operations import Activations, ForwardContext, Operations
from kernels.interface.special_inputs import PositionScores
from kernels.interface.weights import LinearWeight


class DistanceEmbeddings:
    """What all layers make their vectors of distances from: a learned row a bucket.

    Args:
        name: checkpoint prefix.
        span: buckets on each side.
        size: of a row.
        max_distance: that of the last bucket, from the middle of a side on they get ever wider;
            None: one a distance.
        reach: the largest distance of two tokens.
        norm: of the rows.
    """

    def __init__(
        self,
        name: str,
        *,
        span: int,
        size: int,
        max_distance: int | None,
        reach: int,
        norm: LayerNorm | RMSNorm | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._learned = Parameter(f"{name}.weight", (2 * span, size), dtype, device=device)
        self._norm = norm
        self.num_buckets = 2 * span
        before_N = -torch.arange(-reach, reach + 1)  # how far the key is before the query
        middle, far_N = span // 2, before_N.abs()
        if max_distance is not None:  # in the published order: rounding decides at the edges
            whole = torch.log(torch.tensor((max_distance - 1) / middle))
            wide_N = torch.log(far_N.clamp(min=middle) / middle) / whole * (middle - 1)
            wide_N = (wide_N.ceil().long() + middle) * before_N.sign()
            before_N = torch.where(far_N <= middle, before_N, wide_N)
        self.buckets_N = (before_N + span).clamp(0, 2 * span - 1).int()

    def placements(self) -> Placements:
        """The rows, and their norm."""
        parts = [self._learned.placements()]
        return merge(parts if self._norm is None else [*parts, self._norm.placements()])

    def rows(self) -> torch.Tensor:
        """[num_buckets, size], normed."""
        rows_BE = self._learned.tensor
        return rows_BE if self._norm is None else self._norm(rows_BE)


class DisentangledAttention(Attention):
    """See the module's docstring. As many heads of keys as of queries; whole sequences in a step.

    Args:
        projections: make queries, then keys of distances; None: those of tokens do.
        others: see `Attention`.
    """

    def __init__(
        self,
        layer: int,
        *,
        qkv: FusedLinear,
        distances: DistanceEmbeddings,
        projections: FusedLinear | None,
        **others: Any,
    ) -> None:
        super().__init__(layer, qkv=qkv, **others)
        self._project = qkv
        self._distances = distances
        self._projections = projections
        self._of_queries: list[LinearWeight] = []
        self._of_keys: list[LinearWeight] = []
        """By head, what queries and keys of tokens are multiplied with."""

    def placements(self) -> Placements:
        own = [] if self._projections is None else [self._projections.placements()]
        return merge([super().placements(), *own])

    def finish_loading(self, ops: Operations) -> None:
        """Make each head's vectors of distances, times the scale of scores."""
        made_BN = (self._projections or self._project)(self._distances.rows()) * self._params.scale
        num_heads, head_size = self._rotary.num_query_heads, self._rotary.head_size
        of_heads = [
            ops.prepare_linear(each_BD.contiguous())
            for each_BD in made_BN.chunk(made_BN.shape[1] // head_size, 1)[: 2 * num_heads]
        ]
        self._of_keys, self._of_queries = of_heads[:num_heads], of_heads[num_heads:]
        self._projections = None

    def __call__(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the layer's cache."""
        ops, metadata = context.ops, context.metadata[self._layer]
        kv, num_heads = context.kv_caches[self._layer], self._rotary.num_query_heads
        qkv_TN = self._project(x_TE)
        sizes = [self._rotary.head_size] * 3 * num_heads
        parts = qkv_TN.split(sizes, 1)  # type: ignore[no-untyped-call]
        scores = PositionScores(
            queries=list(map(ops.linear, parts[:num_heads], self._of_queries)),
            keys=list(map(ops.linear, parts[num_heads:], self._of_keys)),
            buckets_N=self._distances.buckets_N,
            num_buckets=self._distances.num_buckets,
        )
        slots_T = metadata.slot_mapping_T
        q_THD = ops.rotary_and_cache(qkv_TN, positions_T, slots_T, kv, self._rotary)
        out_THD = ops.paged_attention(q_THD, *kv.parts, metadata, self._params, scores)
        return self.output(out_THD.flatten(1))
