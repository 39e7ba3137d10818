"""The indexer of DeepSeek sparse attention (arXiv:2512.02556): a few small heads that score every
key, of which a layer attends the best alone.

    q = rotated(c_q W_Q)   k = rotated(norm(x W_K))   w = x W_W        cached: k
    score[t, s] = sum over heads of w[t] max(q[t] k[s], 0)

Published code scales w and scores by numbers that all of a token's share, and turns q and k by one
orthogonal matrix before it rounds them to 8 bits: neither changes an order, both are left out.
"""

from functools import partial

import torch

from engine_core.layers.config import LatentConfig
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import LayerNorm
from engine_core.layers.parameters import Placements, merge
from kernels.interface.operations import ForwardContext, Operations, RotaryParams

_NORM_EPS = 1e-6


class Indexer:
    """See the module. The rotary part of a head comes first.

    Args:
        layer: index into the context's caches and metadata.
        name: prefix of its tensors in checkpoints.
        cos_sin_PD: see `RotaryParams`.

    Attributes:
        chosen_TK: of the step in progress: layers behind this one may attend the same keys.
    """

    chosen_TK: torch.Tensor

    def __init__(
        self,
        layer: int,
        name: str,
        config: LatentConfig,
        num_inputs: int,
        *,
        cos_sin_PD: torch.Tensor,
        dtype: torch.dtype,
        ops: Operations,
    ) -> None:
        assert config.query_rank is not None, "its queries are made of the layer's c_q"
        self._layer = layer
        self._config = config
        linear = partial(FusedLinear, bias=False, dtype=dtype, ops=ops)
        width = config.index_heads * config.index_size
        self._queries = linear([(f"{name}.wq_b", width)], config.query_rank)
        self._key = linear([(f"{name}.wk", config.index_size)], num_inputs)
        # few rows, by which heads are weighed
        self._weights = linear(
            [(f"{name}.weights_proj", config.index_heads)], num_inputs, least_bits=32
        )
        self._norm = LayerNorm(
            f"{name}.k_norm", config.index_size, _NORM_EPS, bias=True, dtype=dtype, ops=ops
        )
        self._rotary = RotaryParams(
            num_query_heads=config.index_heads, head_size=config.index_size, cos_sin_PD=cos_sin_PD
        )

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [self._queries, self._key, self._weights]

    def placements(self) -> Placements:
        """Its tensors."""
        products = [linear.placements() for linear in self.linears]
        return merge([*products, self._norm.placements()])

    def begin(
        self,
        x_TE: torch.Tensor,
        query_TN: torch.Tensor,
        positions_T: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's inputs and c_q -> (q_TN, weights_TH); writes the tokens' keys."""
        q_THD = context.ops.rotary_and_cache(
            torch.cat([self._queries(query_TN), self._norm(self._key(x_TE))], 1),
            positions_T,
            context.metadata[self._layer].slot_mapping_T,
            context.kv_caches[self._layer].index,
            self._rotary,
        )
        return q_THD.flatten(1), self._weights(x_TE)

    def choose(
        self, q_TN: torch.Tensor, weights_TH: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """What `begin` gave -> chosen_TK, see `Operations.choose_keys`."""
        index, metadata = context.kv_caches[self._layer].index, context.metadata[self._layer]
        assert index is not None, "the layer's cache has no keys of an indexer"
        q_THD = q_TN.view(-1, self._config.index_heads, self._config.index_size)
        self.chosen_TK = context.ops.choose_keys(
            q_THD, weights_TH, index, metadata, self._config.top_k
        )
        return self.chosen_TK
