"""GTE: BERT with rotation and a gate; also Snowflake Arctic Embed M 2.0."""

from dataclasses import replace

from engine_core.layers.config import InterleavedRows
from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    EncoderConfig,
    EncoderNames,
    read_activation,
    read_spec,
    refuse_unless,
)
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoders.bert import bert_head
from engine_core.models.rotary_config import read_rotary

QKV = tuple(f"self_attn.{part}_proj" for part in "qkv")
ROTATED_NAMES = EncoderNames(
    words="embeddings.word_embeddings",
    positions=None,
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    qkv=tuple(f"layers.{{}}.{name}" for name in QKV),
    attention_output="layers.{}.self_attn.o_proj",
    attention_norm="layers.{}.post_attention_layernorm",
    up=("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"),
    down="layers.{}.mlp.down_proj",
    output_norm="layers.{}.post_mlp_layernorm",
)
_NEW = {"vocab_size": 30_528, "max_position_embeddings": 2048, "rope_theta": 10_000.0}
"""Fields of a `NewModel`, where its config.json does not spell them out."""


def read_rotated(fields: ConfigFields, *, theta: float, packed: str) -> EncoderConfig:
    """BERT with rotation and a gate. `theta`: of the angles, where the file does not say.
    `packed`: the tensor of a layer that may hold queries, keys and values."""
    num_layers = fields.positive_int("num_hidden_layers", 12)
    spec = read_spec(fields, (None,) * num_layers, max_model_len=8192)
    rotary = read_rotary(fields, head_size=spec.keys_of(0).key_size, default_theta=theta)
    has_types = fields.get("type_vocab_size") != 0
    parts = tuple((name, (spec.hidden_size,)) for name in QKV)
    return EncoderConfig(
        spec=spec,
        intermediate_size=fields.positive_int("intermediate_size", 3072),
        norm_eps=fields.positive_float("layer_norm_eps", 1e-12),
        activation=read_activation(fields, "hidden_act", gated=True),
        gated=True,
        up_bias=False,
        num_token_types=fields.positive_int("type_vocab_size", 1) if has_types else 1,
        rotary=(rotary,) * num_layers,
        interleaved=(InterleavedRows(packed, 1, parts),),
        names=ROTATED_NAMES if has_types else replace(ROTATED_NAMES, token_types=None),
    )


def read_gte(fields: ConfigFields) -> EncoderConfig:
    refuse_unless(fields, position_embedding_type="rope", layer_norm_type="layer_norm")
    refuse_unless(fields, logn_attention_scale=False)
    fields = fields.with_defaults({"vocab_size": 250_048})
    gte = read_rotated(fields, theta=160_000.0, packed="attention.qkv_proj")
    size = gte.intermediate_size
    gate = InterleavedRows(
        "mlp.up_gate_proj", 1, (("mlp.up_proj", (size,)), ("mlp.gate_proj", (size,)))
    )
    return replace(gte, interleaved=(*gte.interleaved, gate))


def read_new(fields: ConfigFields) -> EncoderConfig:
    """GTE under the name of its first code, `NewModel`."""
    return read_gte(fields.with_defaults(_NEW))


FAMILIES = tuple(
    family
    for stem, model_type, read in (("Gte", "gte", read_gte), ("New", "new", read_new))
    for family in encoder_family(
        stem,
        model_type,
        read,
        bert_head,
        base=f"{model_type}.",
        unused=("pooler.", "lm_head.", "classifier."),
        layers={"encoder.layer.": "layers."},
        renamed={
            **{f"attention.{part}_proj": f"self_attn.{part}_proj" for part in "qkvo"},
            "attn_ln": "post_attention_layernorm",
            "mlp_ln": "post_mlp_layernorm",
        },
    )
)
