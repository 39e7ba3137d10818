"""Gemma 3, the text model: embeddings are scaled by sqrt(hidden size) rounded to the model's
dtype; norms hold their weight less one; windows and angles differ by layer.

    hidden = hidden + norm(attention(norm(hidden)))
    hidden = hidden + norm(feed_forward(norm(hidden)))
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine_core.layers.parameters import Placements
from engine_core.models.config import ModelConfig
from engine_core.models.decoder import Decoder, DecoderLayer, LayerBuilder
from kernels.interface.operations import ForwardContext


class Gemma3Layer(DecoderLayer):
    """Attention and feed-forward with a norm before and after each."""

    def __init__(self, build: LayerBuilder, layer: int) -> None:
        super().__init__(build, layer)
        name = f"model.layers.{layer}"
        # the shared layer's name for the norm before the feed-forward is the one after attention
        self.attention_norm = self.feed_forward_norm
        self.feed_forward_norm = build.norm(f"{name}.pre_feedforward_layernorm")
        self.output_norm = build.norm(f"{name}.post_feedforward_layernorm")

    def placements(self) -> Iterable[Placements]:
        return (
            *super().placements(),
            self.attention_norm.placements(),
            self.output_norm.placements(),
        )

    def attend(
        self, x_TE: torch.Tensor, positions_T: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        return self.attention_norm(super().attend(x_TE, positions_T, context))

    def feed(self, x_TE: torch.Tensor) -> torch.Tensor:
        return self.output_norm(super().feed(x_TE))


class Gemma3Decoder(Decoder):
    """See the module."""

    layer_class = Gemma3Layer
    norms_plus_one = True

    @staticmethod
    def _embedding_scale(config: ModelConfig) -> float:
        scale: float = config.hidden_size**0.5
        return scale
