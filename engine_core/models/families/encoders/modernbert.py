"""ModernBERT: norms before, rotation, a window in two layers of three, a gate."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    EncoderConfig,
    EncoderNames,
    HeadConfig,
    num_labels,
    read_activation,
    read_spec,
)
from engine_core.models.errors import ModelConfigError
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoder_gguf import encoder_gguf
from engine_core.models.families.gguf import Fields, Metadata
from engine_core.models.rotary_config import read_rotary_by_layer_type

_THETA, _LOCAL_THETA = 160_000.0, 10_000.0
_MODERNBERT_NAMES = EncoderNames(
    words="embeddings.tok_embeddings",
    positions=None,
    token_types=None,
    embedding_norm="embeddings.norm",
    qkv=("layers.{}.attn.Wqkv",),
    attention_output="layers.{}.attn.Wo",
    attention_norm="layers.{}.attn_norm",
    up=("layers.{}.mlp.Wi",),
    down="layers.{}.mlp.Wo",
    output_norm="layers.{}.mlp_norm",
    final_norm="final_norm",
)


def read_modernbert(fields: ConfigFields) -> EncoderConfig:
    num_layers = fields.positive_int("num_hidden_layers", 22)
    every = fields.positive_int("global_attn_every_n_layers", 3)
    types = fields.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
        raise ModelConfigError(f"config: layer_types are {types!r} for {num_layers} layers")
    window = fields.positive_int("local_attention", 128) // 2 + 1
    windows = tuple(window if kind == "sliding_attention" else None for kind in types)
    spec = read_spec(fields, windows, vocab_size=50_368, max_model_len=8192)
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=spec.keys_of(0).key_size,
        full_theta=fields.positive_float("global_rope_theta", _THETA),
        sliding_theta=fields.positive_float("local_rope_theta", _LOCAL_THETA),
    )
    return EncoderConfig(
        spec=spec,
        intermediate_size=fields.positive_int("intermediate_size", 1152),
        norm_eps=fields.positive_float("norm_eps", 1e-5),
        activation=read_activation(fields, "hidden_activation", gated=True),
        pre_norm=True,
        gated=True,
        attention_bias=fields.flag("attention_bias", False),
        up_bias=fields.flag("mlp_bias", False),
        down_bias=fields.flag("mlp_bias", False),
        norm_bias=fields.flag("norm_bias", False),
        rotary=tuple(rotary[kind] for kind in types),
        names=_MODERNBERT_NAMES,
    )


def modernbert_head(fields: ConfigFields) -> HeadConfig:
    pooling = fields.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ModelConfigError(f"config: classifier_pooling is {pooling!r}, not cls or mean")
    return HeadConfig(
        pooling="cls" if pooling == "cls" else "mean",
        dense="head.dense",
        dense_bias=fields.flag("classifier_bias", False),
        activation=read_activation(fields, "classifier_activation"),
        norm="head.norm",
        out="classifier",
        num_labels=num_labels(fields),
    )


def modernbert_token_head(fields: ConfigFields) -> HeadConfig:
    return replace(modernbert_head(fields), pooling="tokens")


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    local = float(meta.number("rope.freq_base_swa", _LOCAL_THETA))
    rotary = {
        "full_attention": config["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }
    return {
        "norm_eps": config["rms_norm_eps"],
        "hidden_activation": meta.number("hidden_activation", "gelu"),
        "local_attention": int(meta.number("attention.sliding_window")),
        "global_attn_every_n_layers": int(meta.number("attention.sliding_window_pattern", 3)),
        "rope_parameters": rotary,
    }


FAMILIES = encoder_family(
    "ModernBert",
    "modernbert",
    read_modernbert,
    modernbert_head,
    modernbert_token_head,
    base="model.",
    unused=("head.", "decoder."),
    gguf=encoder_gguf("modern-bert", _MODERNBERT_NAMES, fields=_gguf_fields, theta=_THETA),
)
