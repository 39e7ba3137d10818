"""Qwen 3: norms within heads, a head size of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_qwen_windows
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, QK_NORMS, Fields, Gguf, Metadata

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    config = read_decoder(
        fields,
        default_max_position=32_768,
        default_num_kv_heads=32,
        default_head_size=128,
        sliding_windows=read_qwen_windows(fields),
    )
    biased = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=biased, output_bias=biased, block=block)


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, head_norms=True))


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in meta.tensors,
    }


FAMILIES = (
    Family(
        names=("Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"),
        model_type="qwen3",
        read=read,
        gguf=Gguf(
            architecture="qwen3", also=("qwen3vl",), layer=LLAMA | QK_NORMS, fields=_gguf_fields
        ),
    ),
)
