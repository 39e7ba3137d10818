"""Granite 3: Llama with four factors: on embeddings, scores, residuals and logits."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.families.dense import llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    return replace(
        llama.read(fields),
        embedding_scale=fields.positive_float("embedding_multiplier", 1.0),
        attention_scale=fields.positive_float("attention_multiplier", 1.0),
        residual_scale=fields.positive_float("residual_multiplier", 1.0),
        logits_divisor=fields.positive_float("logits_scaling", 1.0),
    )


_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
SCALES = frozenset(_SCALES)


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    scores = meta.number("attention.scale", config["head_dim"] ** -0.5)
    return {
        **llama.gguf_fields(meta, config),
        **{field: meta.number(key, 1.0) for key, field in _SCALES.items()},
        "attention_multiplier": scores,
    }


FAMILIES = (
    Family(
        names=("GraniteForCausalLM", "GraniteModel"),
        model_type="granite",
        read=read,
        gguf=Gguf(
            architecture="granite",
            layer=LLAMA,
            fields=gguf_fields,
            pairs_rows=True,
            scales=SCALES,
        ),
    ),
)
