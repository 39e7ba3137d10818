"""DeBERTa v2 and v3: BERT's layers, whose attention takes distances of tokens by themselves."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    DisentangledConfig,
    EncoderConfig,
    HeadConfig,
    num_labels,
    read_activation,
    refuse_unless,
)
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoders.bert import read_bert

_XLARGE = {"vocab_size": 128_100, "layer_norm_eps": 1e-7, "type_vocab_size": 0}
_XLARGE |= {"hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24}
_XLARGE |= {"intermediate_size": 6144}
"""Sizes that a config.json may leave out."""
_ATTENTION = "encoder.layer.{}.attention.self."
_PROJECTIONS = (f"{_ATTENTION}pos_query_proj", f"{_ATTENTION}pos_key_proj")


def read_deberta(fields: ConfigFields) -> EncoderConfig:
    fields = fields.with_defaults(_XLARGE)
    if kernel := fields.get("conv_kernel_size"):
        raise UnsupportedArchitecture(
            f"conv_kernel_size {kernel} (the convolution of deberta-v2-xlarge) is not supported; "
            "serve a model without it, such as deberta-v3-large"
        )
    kinds = fields.get("pos_att_type") or []
    kinds = kinds.split("|") if isinstance(kinds, str) else kinds
    is_relative = fields.flag("relative_attention", False)
    if not is_relative or {str(kind).strip().lower() for kind in kinds} != {"c2p", "p2c"}:
        raise UnsupportedArchitecture(
            f"relative_attention {is_relative} with pos_att_type {kinds} is not supported, only "
            "true with c2p and p2c"
        )
    num_types = fields.get("type_vocab_size")
    bert = read_bert(fields.with_values({"type_vocab_size": num_types or 1}))
    spec = bert.spec
    head_size = spec.keys_of(0).key_size
    refuse_unless(fields, embedding_size=spec.hidden_size, attention_head_size=head_size)
    longest, span = (
        fields.get(name) or -1 for name in ("max_relative_positions", "position_buckets")
    )
    longest = spec.max_model_len if longest < 1 else longest
    is_shared = fields.flag("share_att_key", False)
    has_norm = "layer_norm" in fields.text("norm_rel_ebd", "none").lower()
    names = replace(
        bert.names,
        positions=bert.names.positions if fields.flag("position_biased_input", True) else None,
        token_types=bert.names.token_types if num_types else None,
        qkv=tuple(f"{_ATTENTION}{part}_proj" for part in ("query", "key", "value")),
    )
    distances = DisentangledConfig(
        names=("encoder.rel_embeddings", "encoder.LayerNorm" if has_norm else None),
        projections=() if is_shared else _PROJECTIONS,
        span=span if span > 0 else longest,
        max_distance=longest if span > 0 else None,
    )
    # products of three kinds are added up
    scale = (3 * head_size) ** -0.5
    return replace(bert, names=names, attention_scale=scale, disentangled=distances)


def deberta_head(fields: ConfigFields) -> HeadConfig:
    return HeadConfig(
        pooling="cls",
        dense="pooler.dense",
        activation=read_activation(fields, "pooler_hidden_act"),
        out="classifier",
        num_labels=num_labels(fields),
    )


FAMILIES = encoder_family(
    "DebertaV2",
    "deberta-v2",
    read_deberta,
    deberta_head,
    base="deberta.",
    unused=("pooler.", "cls.", "lm_predictions.", "mask_predictions.", "classifier."),
)
