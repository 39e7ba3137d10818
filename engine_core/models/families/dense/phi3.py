"""Phi-3, 3.5, 4 and 4-mini: q, k and v are one tensor, gate and up another; a part of a head may
turn. LongRoPE's models run up to the length that they were first trained with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder, read_window
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LONG_FACTORS, TWO_NORMS, Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults({"original_max_position_embeddings": 4096})
    spelled = fields.mapping("rope_scaling") or fields.mapping("rope_parameters") or {}
    is_long = spelled.get("rope_type", spelled.get("type")) in ("longrope", "su", "yarn")
    if is_long:
        fields = fields.with_values({"rope_scaling": {**spelled, "rope_type": "longrope"}})
    num_layers = fields.positive_int("num_hidden_layers")
    rotary = read_rotary(fields, head_size=head_size_of(fields), turns_a_part=True)
    config = read_decoder(
        fields,
        default_max_position=4096,
        default_norm_eps=1e-5,
        sliding_windows=(read_window(fields),) * num_layers,
        rotary=(rotary,) * num_layers,
    )
    original = fields.positive_int("original_max_position_embeddings")
    length = config.spec.max_model_len
    spec = replace(config.spec, max_model_len=min(length, original) if is_long else length)
    return replace(config, spec=spec, block=block, can_be_shared=False)


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(
        layer,
        build.attention(layer, fused="qkv_proj"),
        build.feed_forward(layer, halves=("gate_up_proj",)),
    )


_GGUF_LAYER = TWO_NORMS | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    window = int(meta.number("attention.sliding_window", None) or 0) or None
    fields: Fields = {"hidden_act": "silu", "sliding_window": window}
    if "rope_factors_short.weight" not in meta.tensors:
        return fields
    rotary = config["rope_parameters"] | {
        "rope_type": "longrope",
        "short_factor": meta.numbers("rope_factors_short.weight"),
        "long_factor": meta.numbers("rope_factors_long.weight"),
        "attention_factor": float(meta.number("rope.scaling.attn_factor")),
    }
    original = int(meta.number("rope.scaling.original_context_length"))
    return fields | {"rope_parameters": rotary, "original_max_position_embeddings": original}


FAMILIES = (
    Family(
        names=("Phi3ForCausalLM", "Phi3Model", "Phi3ForSequenceClassification"),
        model_type="phi3",
        read=read,
        gguf=Gguf(
            architecture="phi3",
            layer=_GGUF_LAYER,
            fields=_gguf_fields,
            turns_a_part=True,
            read_tensors=LONG_FACTORS,
        ),
    ),
)
