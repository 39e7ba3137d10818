"""Self-attention over the paged cache, with the projections around it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

import torch

from engine_core.layers.config import QueryScale
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import RMSNorm
from engine_core.layers.parameters import (
    AnyPlacement,
    CopyWeight,
    Parameter,
    Placement,
    Placements,
    merge,
    place,
)
from kernels.interface.operations import Activations, AttentionParams, ForwardContext, RotaryParams


def scaled(
    q_THD: torch.Tensor, positions_T: torch.Tensor, scale: QueryScale | None
) -> torch.Tensor:
    """Queries with the factor of their positions, if there is one."""
    if scale is None:
        return q_THD
    factor_T = 1 + scale.beta * torch.log1p((positions_T // scale.length).float())
    return q_THD * factor_T.to(q_THD.dtype)[:, None, None]


class NormedProjections:
    """q, k, v with norms over all heads of q and of k, side by side.
    `parts`: q, k, v. `norms`: of q and of k."""

    def __init__(self, parts: Sequence[FusedLinear], norms: Sequence[RMSNorm]) -> None:
        self.parts = list(parts)
        self._norms = list(norms)

    def placements(self) -> Placements:
        """Each checkpoint tensor of the projections and norms, and its place in them."""
        parts = [part.placements() for part in self.parts]
        return merge([*parts, *(norm.placements() for norm in self._norms)])

    def __call__(self, x_TE: Activations) -> torch.Tensor:
        """[T, E] -> [T, (H + 2K) * D]."""
        q_TN, k_TN, v_TN = (part(x_TE) for part in self.parts)
        q_norm, k_norm = self._norms
        return torch.cat([q_norm(q_TN), k_norm(k_TN), v_TN], 1)


class KeysAsValues:
    """q, k, v of a product that makes q and k: keys are values, too.
    `sizes`: columns of q and of k."""

    def __init__(self, linear: FusedLinear, sizes: tuple[int, int]) -> None:
        self.parts = [linear]
        self._sizes = sizes

    def placements(self) -> Placements:
        """Those of the product."""
        return self.parts[0].placements()

    def __call__(self, x_TE: Activations) -> torch.Tensor:
        """[T, E] -> [T, (H + 2K) * D]."""
        qk_TN = self.parts[0](x_TE)
        _, k_TN = qk_TN.split(self._sizes, 1)  # type: ignore[no-untyped-call]
        return torch.cat([qk_TN, k_TN], 1)


class RotatedNorms:
    """Norms of q and k within a head whose weights act after rotation (Hunyuan). Keys are kept
    without theirs, which queries have, too: `(w_q q) . (w_k k) = (w_q w_k q) . k`.
    `norms`: of q and of k."""

    def __init__(self, norms: Sequence[RMSNorm], num_query_heads: int) -> None:
        self._norms = norms
        self._heads = num_query_heads, len(norms[0].weight)
        self._weight_1N = norms[0].weight.new_full((1, math.prod(self._heads)), math.nan)

    def placements(self) -> Placements:
        norms = merge([norm.placements() for norm in self._norms])
        return {
            name: Placement(norm.shape, partial(self._store, norm)) for name, norm in norms.items()
        }

    def _store(self, norm: AnyPlacement, tensor: torch.Tensor, copy: CopyWeight) -> None:
        place(norm, tensor, copy)
        of_q, of_k = (each.weight.float() for each in self._norms)
        self._weight_1N.copy_((of_q * of_k).repeat(self._heads[0]))

    def __call__(self, q_THD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[T, H, D] -> [T, H, D]."""
        return context.ops.gate(q_THD.flatten(1), self._weight_1N, None).view(-1, *self._heads)


class Attention:
    """q, k, v in one product; norm and rotation; cache write; attention; output projection.

    Args:
        layer: index into the context's caches and metadata.
        keeps_keys: False: it reads another layer's keys and values, and `qkv` makes queries alone.
        head_norms: norms of q and k within a head, before rotation.
        rotary: with the weights of `head_norms`.
        sinks: those of `params`.
    """

    def __init__(
        self,
        layer: int,
        *,
        qkv: FusedLinear | NormedProjections | KeysAsValues,
        output: FusedLinear,
        keeps_keys: bool = True,
        head_norms: Sequence[RMSNorm],
        rotary: RotaryParams,
        params: AttentionParams,
        query_scale: QueryScale | None = None,
        sinks: Parameter | None = None,
    ) -> None:
        self._layer = layer
        self._keeps_keys = keeps_keys
        self._qkv = qkv
        self.first = qkv if isinstance(qkv, FusedLinear) else None
        self.output = output
        self._head_norms: Sequence[RMSNorm | RotatedNorms] = head_norms
        self._rotated_norms: RotatedNorms | None = None
        self._rotary = rotary
        self._params = params
        self._query_scale = query_scale
        self._sinks = sinks

    def norm_after_rotation(self) -> Self:
        """From now on the weights of the head norms act after rotation."""
        q_norm, k_norm = (norm for norm in self._head_norms if isinstance(norm, RMSNorm))
        unit_D, rotary = torch.ones_like(q_norm.weight), self._rotary
        self._rotated_norms = RotatedNorms((q_norm, k_norm), rotary.num_query_heads)
        self._head_norms = [self._rotated_norms]
        self._rotary = replace(rotary, q_norm_weight_D=unit_D, k_norm_weight_D=unit_D)
        return self

    @property
    def linears(self) -> list[FusedLinear]:
        qkv = self._qkv
        return [*([qkv] if isinstance(qkv, FusedLinear) else qkv.parts), self.output]

    def placements(self) -> Placements:
        parts = [self._qkv.placements(), self.output.placements()]
        parts += [norm.placements() for norm in self._head_norms]
        parts += [] if self._sinks is None else [self._sinks.placements()]
        return merge(parts)

    def __call__(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values to the layer's cache."""
        return self.finish(self.begin(x_TE, positions_T, context), context)

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """The first half: [T, E] -> q_THD; writes keys and values."""
        q_THD = context.ops.rotary_and_cache(
            self._qkv(x_TE),
            positions_T,
            context.metadata[self._layer].slot_mapping_T,
            context.kv_caches[self._layer] if self._keeps_keys else None,
            self._rotary,
        )
        if self._rotated_norms is not None:
            q_THD = self._rotated_norms(q_THD, context)
        return scaled(q_THD, positions_T, self._query_scale)

    def finish(self, q_THD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """The second: q_THD -> [T, E]; reads keys and values."""
        return self.output(self.attend(q_THD, context))

    def attend(self, q_THD: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """q_THD -> all heads' outputs, [T, H * D]; reads keys and values."""
        kv, metadata = context.kv_caches[self._layer], context.metadata[self._layer]
        out_THD = context.ops.paged_attention(q_THD, *kv.parts, metadata, self._params)
        return out_THD.flatten(1)


class GatedAttention:
    """Attention whose heads are multiplied with gates before the output projection (Qwen3-Next).
    `gate`: as wide as all heads of queries, in their order, or one number a head."""

    first = None  # q, k, v and the gates read the inputs

    def __init__(self, attention: Attention, gate: FusedLinear) -> None:
        self._attention = attention
        self._gate = gate
        self._columns_a_gate = attention.output.num_inputs // sum(size for _, size in gate.parts)

    @property
    def linears(self) -> list[FusedLinear]:
        return [*self._attention.linears, self._gate]

    def placements(self) -> Placements:
        return merge([self._attention.placements(), self._gate.placements()])

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first half: [T, E] -> (q_THD, gates [T, H * D or H]); writes keys and values."""
        return self._attention.begin(x_TE, positions_T, context), self._gate(x_TE)

    def finish(
        self, begun: tuple[torch.Tensor, torch.Tensor], context: ForwardContext
    ) -> torch.Tensor:
        """The second: what `begin` gave -> [T, E]; reads keys and values."""
        q_THD, gate_TN = begun
        if self._columns_a_gate > 1:
            gate_TN = gate_TN.repeat_interleave(self._columns_a_gate, 1)
        out_TN = context.ops.gate(self._attention.attend(q_THD, context), gate_TN, "sigmoid")
        return self._attention.output(out_TN)
