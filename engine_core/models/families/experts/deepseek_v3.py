"""DeepSeek V3, R1 and V3.1, Kimi K2, Moonlight and GLM-4.7-Flash: latent attention, and experts by
sigmoids with a bias that chooses."""

from functools import partial

from engine_core.models.blocks.latents import latent_fields, with_latents
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families.experts.deepseek_v2 import (
    GGUF_LAYER,
    by_sigmoid,
    check_scores,
    gguf_fields,
    heads_below_each_other,
)
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import NEXTN, Fields, Gguf

DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
_GLM_DEFAULTS = {
    **DEFAULTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
}


def read(defaults: Fields, fields: ConfigFields) -> ModelConfig:
    fields = latent_fields(fields.with_defaults(defaults))
    check_scores(fields, "sigmoid")
    config = read_decoder(fields, default_max_position=1, experts=read_deepseek_experts(fields))
    return with_latents(config, fields, pairs=fields.flag("rope_interleave", True))


FAMILIES = (
    Family(
        names=("DeepseekV3ForCausalLM", "DeepseekV3Model", "DeepseekV3ForSequenceClassification"),
        model_type="deepseek_v3",
        read=partial(read, DEFAULTS),
        ignored_prefixes=("mtp.",),
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="deepseek2",
            layer=GGUF_LAYER | NEXTN | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"},
            fields=gguf_fields,
            is_of=by_sigmoid,
            reordered=heads_below_each_other,
            has_yarn_log=True,
            has_latents=True,
        ),
    ),
    Family(
        names=("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel"),
        model_type="glm4_moe_lite",
        read=partial(read, _GLM_DEFAULTS),
        experts=QWEN_EXPERTS,
    ),
)
