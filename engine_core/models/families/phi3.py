"""Phi-3, 3.5, 4 and 4-mini: q, k and v are one tensor, gate and up another; a part of a head may
turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder, read_window
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import TWO_NORMS, Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    num_layers = fields.positive_int("num_hidden_layers")
    rotary = read_rotary(fields, head_size=head_size_of(fields), turns_a_part=True)
    return read_decoder(
        fields,
        default_max_position=4096,
        default_norm_eps=1e-5,
        sliding_windows=(read_window(fields),) * num_layers,
        rotary=(rotary,) * num_layers,
        can_be_shared=False,
        block=block,
    )


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


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    window = int(meta.number("attention.sliding_window", None) or 0) or None
    return {"hidden_act": "silu", "sliding_window": window}


FAMILIES = (
    Family(
        names=("Phi3ForCausalLM", "Phi3Model", "Phi3ForSequenceClassification"),
        model_type="phi3",
        read=read,
        gguf=Gguf(architecture="phi3", layer=_GGUF_LAYER, fields=_gguf_fields, turns_a_part=True),
    ),
)
