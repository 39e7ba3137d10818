"""ELECTRA: BERT's layers, behind embeddings that may be narrower than they."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import EncoderConfig, HeadConfig
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoders.bert import read_bert, roberta_head

_SMALL = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
"""Sizes that a config.json may leave out."""


def read_electra(fields: ConfigFields) -> EncoderConfig:
    bert = read_bert(fields.with_defaults(_SMALL))
    width = fields.positive_int("embedding_size", 128)
    if width == bert.spec.hidden_size:
        return bert
    names = replace(bert.names, embedding_projection="embeddings_project")
    return replace(bert, embedding_size=width, names=names)


def electra_head(fields: ConfigFields) -> HeadConfig:
    return replace(roberta_head(fields), activation="gelu")


FAMILIES = encoder_family(
    "Electra",
    "electra",
    read_electra,
    electra_head,
    base="electra.",
    unused=("discriminator_predictions.", "generator_predictions.", "generator_lm_head."),
)
