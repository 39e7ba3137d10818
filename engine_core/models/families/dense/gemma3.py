"""Gemma 3's text model: windows and angles by layer type, norms behind attention and feed-forward
too, scaled embeddings; EmbeddingGemma, which sees to both sides (folders)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    layer_types_by,
    read_decoder,
    read_layer_types,
    read_window,
    windows_of,
)
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    PROJECTIONS,
    QK_NORMS,
    Fields,
    Gguf,
    Metadata,
    layer_types,
)
from engine_core.models.rotary_config import read_rotary_by_layer_type

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_LEFT_OUT = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
}
"""What the published models with images leave out, each another part."""
_PATTERN = 6  # one layer in six sees everything
_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_EMBEDDING = "Gemma3TextModel"  # EmbeddingGemma's name


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_LEFT_OUT)
    is_bidirectional = fields.flag("use_bidirectional_attention", False)
    if is_bidirectional and fields.get("architectures") != [_EMBEDDING]:
        raise UnsupportedArchitecture(f"use_bidirectional_attention is for {_EMBEDDING} alone")
    if fields.get("attn_logit_softcapping") is not None:
        raise UnsupportedArchitecture("attn_logit_softcapping of Gemma 3 is not supported")
    num_layers, window = fields.positive_int("num_hidden_layers"), read_window(fields, 4096)
    if is_bidirectional and window is not None:
        window = window // 2 + 1  # of each side, the token's own place with it
    kinds = read_layer_types(fields, num_layers)
    if kinds is None:
        pattern = fields.positive_int("sliding_window_pattern", _PATTERN)
        kinds = layer_types_by(pattern, num_layers)
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=fields.positive_int("head_dim", 256),
        full_theta=fields.positive_float("rope_theta", _THETA),
        sliding_theta=fields.positive_float("rope_local_base_freq", _LOCAL_THETA),
    )
    config = read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=4,
        default_head_size=256,
        default_tied=True,
        activation_field="hidden_activation",
        default_activation="gelu_pytorch_tanh",
        sliding_windows=windows_of(kinds, window),
        rotary=tuple(rotary[kind] for kind in kinds),
    )
    softcap = fields.get("final_logit_softcapping")
    biased = fields.flag("attention_bias", False)
    return replace(
        config,
        attention_scale=fields.positive_float("query_pre_attn_scalar", 256) ** -0.5,
        qkv_bias=biased,
        output_bias=biased,
        norms_plus_one=True,
        embedding_scale=fields.positive_int("hidden_size") ** 0.5,
        final_softcap=None if softcap is None else fields.positive_float("final_logit_softcapping"),
        block=block,
        bidirectional=is_bidirectional,
    )


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, head_norms=True), norms="around")


# ---------------------------------------------------------------------- llama.cpp's files


NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERS_OF_27B = 62


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    num_layers = config["num_hidden_layers"]
    scalar = config["head_dim"]
    if num_layers == _LAYERS_OF_27B:  # as llama.cpp tells that model apart
        scalar = config["hidden_size"] // config["num_attention_heads"]
    local_theta = float(meta.number("rope.freq_base_swa", _LOCAL_THETA))
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(meta.number("attention.sliding_window")),
        "layer_types": layer_types(meta, num_layers, _PATTERN),
        "final_logit_softcapping": meta.number("final_logit_softcapping", None),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", None),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


FAMILIES = (
    Family(
        names=("Gemma3ForCausalLM", _EMBEDDING, "Gemma3TextForSequenceClassification"),
        model_type="gemma3_text",
        read=read,
        gguf=Gguf(
            architecture="gemma3",
            layer=PROJECTIONS | GATED | NORMS | QK_NORMS,
            fields=_gguf_fields,
            norms_plus_one=True,
            theta=_THETA,
        ),
    ),
)
