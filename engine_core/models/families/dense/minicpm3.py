"""MiniCPM3: latent attention, and three factors: on embeddings, residuals and logits."""

import math
from dataclasses import replace

from engine_core.models.blocks.latents import latent_fields, with_latents
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    GATED,
    LATENTS,
    LONG_FACTORS,
    TWO_NORMS,
    Fields,
    Gguf,
    Metadata,
    latent_sizes,
)

_DEFAULTS = {
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = latent_fields(fields.with_defaults(_DEFAULTS))
    width = fields.positive_int("hidden_size")
    head = width // fields.positive_int("num_attention_heads")
    num_layers = fields.positive_int("num_hidden_layers")
    root = math.sqrt(num_layers)
    config = read_decoder(
        fields, default_max_position=32_768, default_norm_eps=1e-5, default_tied=True
    )
    config = replace(
        config,
        embedding_scale=fields.positive_float("scale_emb"),
        residual_scale=fields.positive_float("scale_depth", root) / root,
        logits_divisor=width / fields.positive_int("dim_model_base", width),
    )
    values = {"v_head_dim": fields.positive_int("v_head_dim", head)}
    return with_latents(config, fields.with_values(values), pairs=False)


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    """llama.cpp knows the three factors of the one model that there is."""
    head = config["hidden_size"] // config["num_attention_heads"]
    fields: Fields = {"hidden_act": "silu", **latent_sizes(meta, config, head)}
    if "rope_factors_short.weight" not in meta.tensors:
        return fields
    rotary = {
        "rope_type": "longrope",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "short_factor": meta.numbers("rope_factors_short.weight"),
        "long_factor": meta.numbers("rope_factors_long.weight"),
        "attention_factor": 1.0,
    }
    original = config["max_position_embeddings"]
    return fields | {"rope_parameters": rotary, "original_max_position_embeddings": original}


FAMILIES = (
    Family(
        names=("MiniCPM3ForCausalLM", "MiniCPM3Model", "MiniCPM3ForSequenceClassification"),
        model_type="minicpm3",
        read=read,
        gguf=Gguf(
            architecture="minicpm3",
            layer=LATENTS | GATED | TWO_NORMS,
            fields=_gguf_fields,
            read_tensors=LONG_FACTORS,
            has_latents=True,
        ),
    ),
)
