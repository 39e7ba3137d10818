"""Ministral 3: Mistral, whose queries may grow with their position."""

from dataclasses import replace

from engine_core.layers.config import QueryScale
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder, read_window
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import LLAMA, Fields, Gguf, Metadata

_LENGTH = 16_384
ROTARY = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": _LENGTH,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(fields: ConfigFields) -> ModelConfig:
    if fields.get("rope_parameters") is None:
        fields = fields.with_values({"rope_parameters": ROTARY})
    config = read_decoder(
        fields,
        default_max_position=262_144,
        default_num_kv_heads=8,
        default_head_size=128,
        default_norm_eps=1e-5,
        sliding_windows=(read_window(fields),) * fields.positive_int("num_hidden_layers"),
    )
    return replace(config, query_scale=query_scale(fields))


def query_scale(fields: ConfigFields) -> QueryScale | None:
    """What queries are multiplied by, if the angles' options say so."""
    rotary = ConfigFields(fields.mapping("rope_parameters") or {})
    if not rotary.get("llama_4_scaling_beta"):
        return None
    return QueryScale(
        rotary.positive_float("llama_4_scaling_beta"),
        rotary.positive_int("original_max_position_embeddings", _LENGTH),
    )


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    beta = meta.number("attention.temperature_scale", 0.0)
    rotary = {**config["rope_parameters"], "llama_4_scaling_beta": beta}
    return {"hidden_act": "silu", "sliding_window": None, "rope_parameters": rotary}


FAMILIES = (
    Family(
        names=("Ministral3ForCausalLM", "Ministral3Model", "Ministral3ForSequenceClassification"),
        model_type="ministral3",
        read=read,
        gguf=Gguf(
            architecture="mistral3",
            layer=LLAMA,
            fields=_gguf_fields,
            pairs_rows=True,
            has_yarn_log=True,
        ),
    ),
)
