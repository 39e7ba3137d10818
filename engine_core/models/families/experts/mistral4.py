"""Mistral 4: DeepSeek V3's attention, whose queries may grow with their position, and experts by
softmax."""

from dataclasses import replace

from engine_core.layers.config import ExpertConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families.dense import ministral3
from engine_core.models.families.experts import deepseek_v2, deepseek_v3
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata

_DEFAULTS = {
    "q_lora_rank": 1024,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "max_position_embeddings": 1 << 20,
}
_ROTARY = ministral3.ROTARY | {
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
}


def read(fields: ConfigFields) -> ModelConfig:
    rotary = dict(fields.mapping("rope_parameters") or _ROTARY)
    rotary.pop("partial_rotary_factor", None)  # of a whole head, which the sizes say
    fields = fields.with_values({"rope_parameters": rotary})
    if fields.positive_int("n_group", 1) > 1:
        raise UnsupportedArchitecture(f"n_group {fields.get('n_group')} of Mistral 4, only 1")
    config = deepseek_v3.read(_DEFAULTS, fields)
    experts = tuple(each and _by_softmax(each) for each in config.experts)
    return replace(config, experts=experts, query_scale=ministral3.query_scale(fields))


def _by_softmax(experts: ExpertConfig) -> ExpertConfig:
    return replace(experts, router=replace(experts.router, scores="softmax", has_bias=False))


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    fields = deepseek_v2.gguf_fields(meta, config)
    beta = meta.number("attention.temperature_scale", 0.0)
    return fields | {"rope_parameters": fields["rope_parameters"] | {"llama_4_scaling_beta": beta}}


FAMILIES = (
    Family(
        names=("Mistral4ForCausalLM", "Mistral4Model", "Mistral4ForSequenceClassification"),
        model_type="mistral4",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="mistral4",
            layer=deepseek_v2.GGUF_LAYER,
            fields=_gguf_fields,
            reordered=deepseek_v2.heads_below_each_other,
            has_yarn_log=True,
            has_latents=True,
        ),
    ),
)
