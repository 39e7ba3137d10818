"""GLM-4.5, 4.6, 4.7 and Solar Open: DeepSeek's experts behind plain attention, of which a part of a
head turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_GLM = {
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "partial_rotary_factor": 0.5,
}
_SOLAR = {
    **_GLM,
    "moe_intermediate_size": 1280,
    "first_k_dense_replace": 0,
    "partial_rotary_factor": 1.0,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
}


def read(fields: ConfigFields) -> ModelConfig:
    return _read(fields.with_defaults(_GLM), has_norms=fields.flag("use_qk_norm", False))


def _read_solar(fields: ConfigFields) -> ModelConfig:
    return _read(fields.with_defaults(_SOLAR), has_norms=False)


def _read(fields: ConfigFields, *, has_norms: bool) -> ModelConfig:
    rotary = read_rotary(fields, head_size=head_size_of(fields), turns_a_part=True)
    experts = read_deepseek_experts(fields)
    config = read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=8,
        default_norm_eps=1e-5,
        rotary=(rotary,) * len(experts),
        experts=experts,
    )
    biased = fields.flag("qkv_bias", fields.flag("attention_bias", False))
    return replace(config, qkv_bias=biased, block=_Block(has_norms))


@dataclass(frozen=True, slots=True)
class _Block:
    """A layer, with norms within heads or without."""

    has_norms: bool

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        return build.block(layer, build.attention(layer, head_norms=self.has_norms))


_GGUF_LAYER = {
    **(gguf.LLAMA | gguf.QK_NORMS | gguf.QWEN_EXPERTS | gguf.SHARED_EXPERTS),
    "post_attention_norm": "post_attention_layernorm",
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return {
        **gguf.deepseek_experts(meta),
        "qkv_bias": "blk.0.attn_q.bias" in meta.tensors,  # the output has none
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensors,
        "partial_rotary_factor": config["rope_parameters"].get("partial_rotary_factor", 1.0),
    }


FAMILIES = (
    Family(
        names=("Glm4MoeForCausalLM", "Glm4MoeModel"),
        model_type="glm4_moe",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="glm4moe", layer=_GGUF_LAYER, fields=_gguf_fields, turns_a_part=True
        ),
    ),
    Family(
        names=("SolarOpenForCausalLM", "SolarOpenModel"),
        model_type="solar_open",
        read=_read_solar,
        experts=QWEN_EXPERTS,
    ),
)
