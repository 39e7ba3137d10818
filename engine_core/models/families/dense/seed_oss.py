"""Seed-OSS: Llama, with biases on q, k and v, and on the output by an option of its own."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import GATED, PROJECTIONS, Fields, Gguf, Metadata

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
    "attention_bias": True,
}


def read(fields: ConfigFields) -> ModelConfig:
    config = llama.read(fields.with_defaults(_DEFAULTS))
    return replace(config, output_bias=fields.flag("attention_out_bias", False))


_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return llama.gguf_fields(meta, config) | {
        "attention_out_bias": "blk.0.attn_output.bias" in meta.tensors
    }


FAMILIES = (
    Family(
        names=("SeedOssForCausalLM", "SeedOssModel", "SeedOssForSequenceClassification"),
        model_type="seed_oss",
        read=read,
        gguf=Gguf(
            architecture="seed_oss",
            layer=PROJECTIONS | GATED | _NORMS,
            fields=_gguf_fields,
            biases_output=False,
        ),
    ),
)
