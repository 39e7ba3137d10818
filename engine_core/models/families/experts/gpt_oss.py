"""gpt-oss: sinks in attention, windows in every second layer, and experts with biases, whose gates
and ups lie row by row in one tensor; published in MXFP4."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import (
    head_size_of,
    layer_types_of,
    read_decoder,
    read_experts,
    read_window,
    windows_of,
)
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_tensors import GPT_OSS_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_CONSTANTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""Numbers of the experts' activation; others are refused."""
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read(fields: ConfigFields) -> ModelConfig:
    for name, value in _CONSTANTS.items():
        if fields.positive_float(name, value) != value:
            raise UnsupportedArchitecture(
                f"{name} {fields.get(name)} is not supported, only {value}"
            )
    num_layers = fields.positive_int("num_hidden_layers", 36)
    layer_types = layer_types_of(fields, num_layers, 2)
    if not (fields.mapping("rope_scaling") or fields.mapping("rope_parameters")):
        fields = fields.with_values({"rope_parameters": _YARN})
    rotary = read_rotary(fields, head_size=head_size_of(fields, 64), default_theta=150_000.0)
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size", 2880),
        default_num_experts=128,
        default_top_k=4,
        renormalise=True,
        round_weights=True,
        naming=GPT_OSS_EXPERTS,
    )
    config = read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=8,
        default_head_size=64,
        default_norm_eps=1e-5,
        sliding_windows=windows_of(layer_types, read_window(fields, 128)),
        rotary=(rotary,) * num_layers,
        experts=(replace(experts, gated="swiglu_oai", has_biases=True),) * num_layers,
    )
    biased = fields.flag("attention_bias", True)
    return replace(config, qkv_bias=biased, output_bias=biased, norms_in_float32=True, block=block)


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, sinks=True))


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    fields = gguf.experts(meta)
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
        "num_local_experts": fields["num_experts"],
        "num_experts_per_tok": fields["num_experts_per_tok"],
        "sliding_window": int(meta.number("attention.sliding_window")),
        # the file does not say it; the published config.json does
        "rope_parameters": config["rope_parameters"] | {"truncate": False},
    }


FAMILIES = (
    Family(
        names=("GptOssForCausalLM", "GptOssModel", "GptOssForSequenceClassification"),
        model_type="gpt_oss",
        read=read,
        experts=GPT_OSS_EXPERTS,
        gguf=Gguf(
            architecture="gpt-oss",
            layer=gguf.PROJECTIONS
            | gguf.QWEN_EXPERTS
            | {
                "attn_norm": "input_layernorm",
                "post_attention_norm": "post_attention_layernorm",
                "attn_sinks.weight": "self_attn.sinks",
            },
            fields=_gguf_fields,
        ),
    ),
)
