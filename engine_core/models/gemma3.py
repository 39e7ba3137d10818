"""Gemma 3, the text model.

    hidden = hidden + norm(attention(norm(hidden)))
    hidden = hidden + norm(feed_forward(norm(hidden)))

Embeddings are scaled by sqrt(hidden size) rounded to the model's dtype; norms hold their weight
less one; windows and angles differ by layer. Owns the order of layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine_core.layers.parameters import Placements, merge
from engine_core.models.config import ModelConfig
from engine_core.models.decoder import LayerBuilder
from engine_core.models.interface import KVCacheSpec
from kernels.interface import ForwardContext, Operations


class _Layer:
    """Attention and feed-forward with a norm before and after each."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        name = f"model.layers.{layer}"
        self.input_norm = build.norm(f"{name}.input_layernorm")
        self.attention = build.attention(layer)
        self.attention_norm = build.norm(f"{name}.post_attention_layernorm")
        self.feed_forward_norm = build.norm(f"{name}.pre_feedforward_layernorm")
        self.feed_forward = build.feed_forward(layer)
        self.output_norm = build.norm(f"{name}.post_feedforward_layernorm")

    def placements(self) -> Iterable[Placements]:
        return (
            self.input_norm.placements(),
            self.attention.placements(),
            self.attention_norm.placements(),
            self.feed_forward_norm.placements(),
            self.feed_forward.placements(),
            self.output_norm.placements(),
        )


class Gemma3Decoder:
    """See the module; implements `engine_core.models.interface.Model`."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, ops: Operations, num_positions: int
    ) -> None:
        build = LayerBuilder(
            config, dtype=dtype, ops=ops, num_positions=num_positions, norms_plus_one=True
        )
        self._config = config
        self.vocabulary = build.vocabulary(embedding_scale=config.hidden_size**0.5)
        self._layers = [_Layer(build, layer) for layer in range(config.num_layers)]
        self._final_norm = build.norm("model.norm")

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        return self._config.kv_cache_spec

    def placements(self) -> Placements:
        """Every tensor that the model takes, by checkpoint name."""
        parts = [self.vocabulary.placements(), self._final_norm.placements()]
        for layer in self._layers:
            parts.extend(layer.placements())
        return merge(parts)

    def forward(
        self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """See `Model.forward`."""
        residual_TE = self.vocabulary.embed(token_ids_T)
        out_TE: torch.Tensor | None = None
        for layer in self._layers:
            if out_TE is None:
                x_TE = layer.input_norm(residual_TE)
            else:
                x_TE, residual_TE = layer.input_norm.add(out_TE, residual_TE)
            out_TE = layer.attention_norm(layer.attention(x_TE, positions_T, context))
            x_TE, residual_TE = layer.feed_forward_norm.add(out_TE, residual_TE)
            out_TE = layer.output_norm(layer.feed_forward(x_TE))
        assert out_TE is not None
        return self._final_norm.add(out_TE, residual_TE)[0]

    def compute_logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """See `Model.compute_logits`."""
        return self.vocabulary.logits(hidden_RE)
