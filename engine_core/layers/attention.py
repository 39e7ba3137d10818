"""Self-attention over the paged cache, with the projections around it."""

from __future__ import annotations

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import Placements, merge
from kernels.interface.operations import AttentionParams, ForwardContext, RotaryParams


class Attention:
    """q, k, v in one product; norm and rotation; cache write; attention; output projection.

    Args:
        layer: index into the context's caches and metadata.
        head_norms: norms of q and k within a head, before rotation.
        cos_sin_PD: table of angles, shared between layers.
        sliding_window: tokens that a query sees, itself included; None for all.
    """

    def __init__(
        self,
        layer: int,
        *,
        qkv: FusedLinear,
        output: FusedLinear,
        head_norms: tuple[RMSNorm, RMSNorm] | None,
        num_query_heads: int,
        head_size: int,
        cos_sin_PD: torch.Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        self._layer = layer
        self._qkv = qkv
        self._output = output
        self._head_norms = head_norms
        self._num_query_heads = num_query_heads
        self._head_size = head_size
        self._cos_sin_PD = cos_sin_PD
        self._params = AttentionParams(scale=scale, sliding_window=sliding_window)

    def placements(self) -> Placements:
        """Of the projections and norms."""
        parts = [self._qkv.placements(), self._output.placements()]
        parts += [norm.placements() for norm in self._head_norms or ()]
        return merge(parts)

    def __call__(
        self, x_TE: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the layer's cache."""
        ops = context.ops
        kv_cache = context.kv_caches[self._layer]
        metadata = context.metadata[self._layer]
        q_norm, k_norm = self._head_norms or (None, None)
        rotary = RotaryParams(
            num_query_heads=self._num_query_heads,
            head_size=self._head_size,
            cos_sin_PD=self._cos_sin_PD,
            q_norm_weight_D=None if q_norm is None else q_norm.weight,
            k_norm_weight_D=None if k_norm is None else k_norm.weight,
            norm_eps=0.0 if q_norm is None else q_norm.eps,
        )
        q_THD = ops.rotary_and_cache(
            self._qkv(x_TE), positions_T, metadata.slot_mapping_T, kv_cache, rotary
        )
        out_THD = ops.paged_attention(q_THD, *kv_cache, metadata, self._params)
        return self._output(out_THD.flatten(1))
