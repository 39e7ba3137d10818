"""MPNet: BERT's layers with a learned bias for the distance of two tokens."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import EncoderConfig, EncoderNames, refuse_unless
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoders.bert import read_roberta, roberta_head

_NAMES = EncoderNames(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types=None,
    embedding_norm="embeddings.LayerNorm",
    qkv=tuple(f"encoder.layer.{{}}.attention.attn.{part}" for part in "qkv"),
    attention_output="encoder.layer.{}.attention.attn.o",
    attention_norm="encoder.layer.{}.attention.LayerNorm",
    up=("encoder.layer.{}.intermediate.dense",),
    down="encoder.layer.{}.output.dense",
    output_norm="encoder.layer.{}.output.LayerNorm",
    distance_bias="encoder.relative_attention_bias",
)
_NUM_BUCKETS = 32
_FIRST_POSITION = 2
"""Row of the first token in the table of positions, whatever `pad_token_id` is."""


def read_mpnet(fields: ConfigFields) -> EncoderConfig:
    refuse_unless(fields, relative_attention_num_buckets=_NUM_BUCKETS)
    return replace(
        read_roberta(fields, first=_FIRST_POSITION),
        num_token_types=1,
        num_distance_buckets=_NUM_BUCKETS,
        names=_NAMES,
    )


FAMILIES = encoder_family(
    "MPNet",
    "mpnet",
    read_mpnet,
    roberta_head,
    base="mpnet.",
    unused=("pooler.", "lm_head.", "classifier."),
)
