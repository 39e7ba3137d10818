"""Qwen 3.5 and 3.6 with experts: also one that all tokens go through, in every layer."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_qwen_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.families.hybrids import qwen3_5
from engine_core.models.families.hybrids.qwen3_5 import (
    GGUF_LAYER,
    UNUSED,
    by_key_head,
    read_hybrid,
)


def read(fields: ConfigFields) -> ModelConfig:
    always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    size = fields.positive_int("moe_intermediate_size", 512)
    experts = read_qwen_experts(
        fields.with_values(always),
        default_num_experts=256,
        default_top_k=8,
        default_intermediate_size=512,
        shared_size=fields.positive_int("shared_expert_intermediate_size", 512),
    )
    # of a dense feed-forward, which no layer has
    return read_hybrid(fields, {"num_key_value_heads": 2, "intermediate_size": size}, experts)


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return {
        **qwen3_5.gguf_fields(meta, config),
        **gguf.experts(meta),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "shared_expert_intermediate_size": int(meta.number("expert_shared_feed_forward_length")),
        "decoder_sparse_step": 1,  # llama.cpp has experts in every layer
        "mlp_only_layers": [],
    }


FAMILIES = (
    Family(
        names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        model_type="qwen3_5_moe_text",
        read=read,
        ignored_prefixes=UNUSED,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="qwen35moe",
            layer=GGUF_LAYER | gguf.QWEN_EXPERTS | gguf.SHARED_EXPERT,
            fields=gguf_fields,
            norms_plus_one=True,
            turns_a_part=True,
            reordered=by_key_head,
        ),
    ),
)
