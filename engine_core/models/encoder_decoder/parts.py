"""Where the parts of transformers' decoders are: one description for BART's relatives and Whisper,
one for T5's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Map = Callable[[torch.Tensor], torch.Tensor]

_T5_LENGTH = 512
"""What the first T5 were trained with. Many config.json, such as mT5's, name none."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`scale`: of the products of queries and keys."""

    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    scale: float


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Three sublayers, each with its norm: before it if `DecoderParts.norms_first`."""

    self_attention: AttentionWeights
    self_norm: nn.Module
    cross_attention: AttentionWeights
    cross_norm: nn.Module
    feed_forward: Map
    feed_forward_norm: nn.Module


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """
    Attributes:
        embed: (token ids [T], positions [T]) -> [T, E].
        finish: [T, E] of the last layer -> hidden_TE.
        head: hidden_RE -> logits_RV.
        max_positions: what a table of positions ends at; with relative ones a usual length.
        bias_of_distance_PH: what each head adds to the score of a key that many positions back
            (T5's relative positions), the last row beyond; None: nothing. By layer.
    """

    embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    layers: tuple[LayerParts, ...]
    norms_first: bool
    finish: Map
    head: Map
    hidden_size: int
    num_heads: int
    head_size: int
    max_positions: int
    bias_of_distance_PH: tuple[torch.Tensor | None, ...]


def bart_parts(model: Any) -> DecoderParts:
    """Decoder parts of BART, mBART, Marian, Pegasus, Whisper (Lewis et al., arXiv:1910.13461)."""
    config, decoder = model.config, model.get_decoder()
    head, bias_1V = model.get_output_embeddings(), getattr(model, "final_logits_bias", None)
    first_norm = getattr(decoder, "layernorm_embedding", nn.Identity())
    last_norm = getattr(decoder, "layer_norm", None)
    offset = getattr(decoder.embed_positions, "offset", 0)
    # BART's embeddings have it in themselves, and Whisper's decoder does not use its own
    scale = 1.0 if config.model_type == "whisper" else getattr(decoder, "embed_scale", 1.0)

    def embed(token_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        at_TE = decoder.embed_positions.weight[positions_T + offset]
        embedded_TE: torch.Tensor = first_norm(decoder.embed_tokens(token_ids_T) * scale + at_TE)
        return embedded_TE

    def logits(hidden_RE: torch.Tensor) -> torch.Tensor:
        logits_RV: torch.Tensor = head(hidden_RE)
        return logits_RV if bias_1V is None else logits_RV + bias_1V

    def attention(module: Any) -> AttentionWeights:
        projections = module.q_proj, module.k_proj, module.v_proj, module.out_proj
        return AttentionWeights(*projections, module.head_dim**-0.5)

    return DecoderParts(
        embed=embed,
        layers=tuple(
            LayerParts(
                self_attention=attention(layer.self_attn),
                self_norm=layer.self_attn_layer_norm,
                cross_attention=attention(layer.encoder_attn),
                cross_norm=layer.encoder_attn_layer_norm,
                feed_forward=_feed_forward(layer),
                feed_forward_norm=layer.final_layer_norm,
            )
            for layer in decoder.layers
        ),
        norms_first=last_norm is not None,
        finish=last_norm or nn.Identity(),
        head=logits,
        hidden_size=config.d_model,
        num_heads=config.decoder_attention_heads,
        head_size=config.d_model // config.decoder_attention_heads,
        max_positions=getattr(config, "max_target_positions", None)
        or config.max_position_embeddings,
        bias_of_distance_PH=(None,) * len(decoder.layers),
    )


def _feed_forward(layer: Any) -> Map:
    def run(x_TE: torch.Tensor) -> torch.Tensor:
        out_TE: torch.Tensor = layer.fc2(layer.activation_fn(layer.fc1(x_TE)))
        return out_TE

    return run


def t5_parts(model: Any) -> DecoderParts:
    """Decoder parts of T5 and mT5 (Raffel et al., arXiv:1910.10683)."""
    config, decoder = model.config, model.get_decoder()
    is_scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    is_scaled = is_scaled and config.model_type == "t5"
    factor = config.d_model**-0.5 if is_scaled else 1.0
    first = decoder.block[0].layer[0].SelfAttention
    buckets, furthest = (
        config.relative_attention_num_buckets,
        config.relative_attention_max_distance,
    )
    distance_P = torch.arange(max(buckets, furthest) + 1)
    bucket_P = first._relative_position_bucket(
        -distance_P,
        bidirectional=False,
        num_buckets=buckets,
        max_distance=furthest,
    )

    def attention(module: Any) -> AttentionWeights:
        return AttentionWeights(module.q, module.k, module.v, module.o, 1.0)

    return DecoderParts(
        embed=lambda token_ids_T, _: decoder.embed_tokens(token_ids_T),
        layers=tuple(
            LayerParts(
                self_attention=attention(block.layer[0].SelfAttention),
                self_norm=block.layer[0].layer_norm,
                cross_attention=attention(block.layer[1].EncDecAttention),
                cross_norm=block.layer[1].layer_norm,
                feed_forward=block.layer[2].DenseReluDense,
                feed_forward_norm=block.layer[2].layer_norm,
            )
            for block in decoder.block
        ),
        norms_first=True,
        finish=decoder.final_layer_norm,
        head=lambda hidden_RE: model.lm_head(hidden_RE * factor),
        hidden_size=config.d_model,
        num_heads=config.num_heads,
        head_size=config.d_kv,
        max_positions=getattr(config, "n_positions", None) or _T5_LENGTH,
        bias_of_distance_PH=(first.relative_attention_bias(bucket_P),) * len(decoder.block),
    )
