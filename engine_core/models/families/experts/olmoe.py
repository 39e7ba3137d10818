"""OLMoE: experts in every layer, and norms over all heads of q and of k."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_experts
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder


def read(fields: ConfigFields) -> ModelConfig:
    if fields.get("clip_qkv") is not None:
        raise UnsupportedArchitecture("clip_qkv of OLMoE is not supported")
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=64,
        default_top_k=8,
        renormalise=fields.flag("norm_topk_prob", False),
        round_weights=True,
        naming=QWEN_EXPERTS,
    )
    config = read_decoder(
        fields,
        default_max_position=4096,
        default_norm_eps=1e-5,
        experts=(experts,) * fields.positive_int("num_hidden_layers"),
    )
    biased = fields.flag("attention_bias", False)
    return replace(config, qkv_bias=biased, output_bias=biased, block=block, can_be_shared=False)


def block(build: BlockBuilder, layer: int) -> Block:
    return build.block(layer, build.attention(layer, all_head_norms=True))


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    meta.refuse_unless("attention.clamp_kqv", 0.0)
    fields = gguf.experts(meta, renormalises=False)
    return {"hidden_act": "silu", "attention_bias": "blk.0.attn_q.bias" in meta.tensors, **fields}


FAMILIES = (
    Family(
        names=("OlmoeForCausalLM", "OlmoeModel"),
        model_type="olmoe",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="olmoe",
            layer=gguf.PROJECTIONS | gguf.TWO_NORMS | gguf.QK_NORMS | gguf.QWEN_EXPERTS,
            fields=_gguf_fields,
        ),
    ),
)
