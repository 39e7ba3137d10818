"""Nemotron and Minitron: layer norms whose weights are stored less one, half of a head turns, and a
feed-forward that has no gate and squares its ReLU."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of
from engine_core.models.families.dense import arcee, llama
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults({"partial_rotary_factor": 0.5})
    rotary = read_rotary(fields, head_size=head_size_of(fields), turns_a_part=True)
    config = arcee.read(fields, rotary)
    return replace(
        config,
        norm_eps=fields.positive_float("norm_eps", 1e-5),
        norm_bias=True,
        norms_plus_one=True,
    )


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    return llama.gguf_fields(meta, config) | {
        "hidden_act": "relu2",
        "norm_eps": config["rms_norm_eps"],
        "partial_rotary_factor": config["rope_parameters"].get("partial_rotary_factor", 1.0),
    }


FAMILIES = (
    Family(
        names=("NemotronForCausalLM", "NemotronModel", "NemotronForSequenceClassification"),
        model_type="nemotron",
        read=read,
        gguf=Gguf(
            architecture="nemotron",
            layer=arcee.GGUF_LAYER,
            fields=_gguf_fields,
            top={"output_norm.bias": "model.norm.bias"},
            norms_plus_one=True,
            turns_a_part=True,
            norm_eps="attention.layer_norm_epsilon",
        ),
    ),
)
