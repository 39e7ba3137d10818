"""Gemma 2: windows in every second layer, soft caps on scores and logits, norms behind attention
and feed-forward too, scaled embeddings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    layer_types_of,
    read_decoder,
    read_window,
    windows_of,
)
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.dense import gemma3
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    PROJECTIONS,
    Fields,
    Gguf,
    Metadata,
    layer_types,
)

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_PATTERN = 2  # one layer in two sees everything


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_CAPS)
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedArchitecture("use_bidirectional_attention is not supported")
    num_layers = fields.positive_int("num_hidden_layers")
    kinds = layer_types_of(fields, num_layers, _PATTERN)
    config = read_decoder(
        fields,
        default_max_position=8192,
        default_num_kv_heads=4,
        default_head_size=256,
        default_tied=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        sliding_windows=windows_of(kinds, read_window(fields, 4096)),
    )
    on_scores, on_logits = (
        None if fields.get(cap) is None else fields.positive_float(cap) for cap in _CAPS
    )
    biased = fields.flag("attention_bias", False)
    return replace(
        config,
        attention_scale=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=on_scores,
        qkv_bias=biased,
        output_bias=biased,
        norms_plus_one=True,
        embedding_scale=config.spec.hidden_size**0.5,
        final_softcap=on_logits,
        block=_block,
    )


def _block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer), norms="around")


_LAYERS_OF_27B = 46


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    num_layers, scalar = config["num_hidden_layers"], config["head_dim"]
    if num_layers == _LAYERS_OF_27B:  # as llama.cpp tells that model apart
        scalar = config["hidden_size"] // config["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(meta.number("attention.sliding_window", 4096)),
        "layer_types": layer_types(meta, num_layers, _PATTERN),
        **{cap: meta.number(cap, default) for cap, default in _CAPS.items()},
    }


FAMILIES = (
    Family(
        names=("Gemma2ForCausalLM", "Gemma2Model", "Gemma2ForSequenceClassification"),
        model_type="gemma2",
        read=read,
        gguf=Gguf(
            architecture="gemma2",
            layer=PROJECTIONS | GATED | gemma3.NORMS,
            fields=_gguf_fields,
            norms_plus_one=True,
        ),
    ),
)
