"""OLMo 2: norms behind attention and feed-forward alone, and over all heads of q and of k."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    NORMS_BEHIND,
    PROJECTIONS,
    QK_NORMS,
    Fields,
    Gguf,
    Metadata,
)

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    biased = fields.flag("attention_bias", False)
    return replace(
        read_decoder(fields, default_max_position=2048, default_norm_eps=1e-5),
        qkv_bias=biased,
        output_bias=biased,
        norms_in_float32=True,
        can_be_shared=False,
        block=block,
    )


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, all_head_norms=True), norms="behind")


GGUF_LAYER = PROJECTIONS | GATED | QK_NORMS | NORMS_BEHIND


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in meta.tensors}


FAMILIES = (
    Family(
        names=("Olmo2ForCausalLM", "Olmo2Model", "Olmo2ForSequenceClassification"),
        model_type="olmo2",
        read=read,
        gguf=Gguf(
            architecture="olmo2",
            layer=GGUF_LAYER,
            fields=_gguf_fields,
        ),
    ),
)
