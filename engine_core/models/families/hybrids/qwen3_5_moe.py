"""Qwen 3.5 and 3.6 with experts, and one that all tokens go through, in every layer."""

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_qwen_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families.family import Family
from engine_core.models.families.hybrids.qwen3_5 import UNUSED, read_hybrid


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


FAMILIES = (
    Family(
        names=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        model_type="qwen3_5_moe_text",
        read=read,
        ignored_prefixes=UNUSED,
        experts=QWEN_EXPERTS,
    ),
)
