"""ALBERT: BERT's layers, of which many share one's weights, behind narrower embeddings."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    EncoderConfig,
    EncoderNames,
    HeadConfig,
    refuse_unless,
)
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoders.bert import bert_head, read_bert

_LAYER = "encoder.albert_layer_groups.{}.albert_layers.0."
_NAMES = EncoderNames(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    embedding_projection="encoder.embedding_hidden_mapping_in",
    qkv=tuple(f"{_LAYER}attention.{part}" for part in ("query", "key", "value")),
    attention_output=f"{_LAYER}attention.dense",
    attention_norm=f"{_LAYER}attention.LayerNorm",
    up=(f"{_LAYER}ffn",),
    down=f"{_LAYER}ffn_output",
    output_norm=f"{_LAYER}full_layer_layer_norm",
)
_XXLARGE = {
    "vocab_size": 30_000,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "intermediate_size": 16_384,
    "hidden_act": "gelu_new",
}
"""Fields that a config.json may leave out."""


def read_albert(fields: ConfigFields) -> EncoderConfig:
    refuse_unless(fields, inner_group_num=1)
    bert = read_bert(fields.with_defaults(_XXLARGE))
    num_layers, num_groups = bert.spec.num_layers, fields.positive_int("num_hidden_groups", 1)
    return replace(
        bert,
        embedding_size=fields.positive_int("embedding_size", 128),
        weights_of_layers=tuple(at * num_groups // num_layers for at in range(num_layers)),
        names=_NAMES,
    )


def albert_head(fields: ConfigFields) -> HeadConfig:
    return replace(bert_head(fields), dense="pooler")


FAMILIES = encoder_family(
    "Albert",
    "albert",
    read_albert,
    albert_head,
    base="albert.",
    unused=("pooler.", "predictions.", "sop_classifier.", "classifier."),
)
