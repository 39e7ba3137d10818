"""Qwen3-Next: Qwen 3.5's layers with experts in most of them; its checkpoints hold what a key head
needs side by side."""

from dataclasses import replace

from engine_core.layers.config import DeltaNetConfig, InterleavedRows
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_qwen_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.families.hybrids import qwen3_5_moe
from engine_core.models.families.hybrids.qwen3_5 import (
    GGUF_LAYER,
    TILED,
    UNUSED,
    read_hybrid,
)


def read(fields: ConfigFields) -> ModelConfig:
    experts = read_qwen_experts(
        fields.with_defaults({"norm_topk_prob": True}),
        default_num_experts=512,
        default_top_k=10,
        default_intermediate_size=512,
        shared_size=fields.positive_int("shared_expert_intermediate_size", 512),
    )
    config = read_hybrid(fields, {"num_key_value_heads": 2}, experts)
    sizes = config.recurrent
    assert isinstance(sizes, DeltaNetConfig)
    shared = sizes.num_heads // sizes.num_key_heads
    values = shared * sizes.value_size
    qkvz = (
        ("linear_attn.in_proj_qkv", (sizes.key_size, sizes.key_size, values)),
        ("linear_attn.in_proj_z", (values,)),
    )
    b_a = (("linear_attn.in_proj_b", (shared,)), ("linear_attn.in_proj_a", (shared,)))
    by_key_head = tuple(
        InterleavedRows(f"linear_attn.{name}", sizes.num_key_heads, parts)
        for name, parts in (("in_proj_qkvz", qkvz), ("in_proj_ba", b_a))
    )
    return replace(config, interleaved=(*config.interleaved, *by_key_head))


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return {**qwen3_5_moe.gguf_fields(meta, config), TILED: False}


FAMILIES = (
    Family(
        names=("Qwen3NextForCausalLM", "Qwen3NextModel", "Qwen3NextForSequenceClassification"),
        model_type="qwen3_next",
        read=read,
        ignored_prefixes=UNUSED,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="qwen3next",
            layer=GGUF_LAYER
            | {"ssm_ba": "linear_attn.in_proj_ba"}
            | gguf.QWEN_EXPERTS
            | gguf.SHARED_EXPERT,
            fields=gguf_fields,
            norms_plus_one=True,
            turns_a_part=True,
        ),
    ),
)
