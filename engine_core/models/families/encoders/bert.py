"""BERT, MiniLM, RoBERTa, CamemBERT, DistilBERT: encoders with norms behind the sums."""

from dataclasses import replace

from engine_core.models.config_fields import ConfigFields
from engine_core.models.encoders.encoder_configs import (
    EncoderConfig,
    EncoderNames,
    HeadConfig,
    num_labels,
    read_activation,
    read_spec,
    refuse_unless,
)
from engine_core.models.errors import ModelConfigError
from engine_core.models.families.encoder_family import encoder_family
from engine_core.models.families.encoder_gguf import encoder_gguf

BERT_NAMES = EncoderNames(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    qkv=tuple(f"encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")),
    attention_output="encoder.layer.{}.attention.output.dense",
    attention_norm="encoder.layer.{}.attention.output.LayerNorm",
    up=("encoder.layer.{}.intermediate.dense",),
    down="encoder.layer.{}.output.dense",
    output_norm="encoder.layer.{}.output.LayerNorm",
)
_DISTILBERT_NAMES = EncoderNames(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    token_types=None,
    embedding_norm="embeddings.LayerNorm",
    qkv=tuple(f"transformer.layer.{{}}.attention.{part}_lin" for part in "qkv"),
    attention_output="transformer.layer.{}.attention.out_lin",
    attention_norm="transformer.layer.{}.sa_layer_norm",
    up=("transformer.layer.{}.ffn.lin1",),
    down="transformer.layer.{}.ffn.lin2",
    output_norm="transformer.layer.{}.output_layer_norm",
)


def read_bert(fields: ConfigFields) -> EncoderConfig:
    """BERT, MiniLM and others that share its code."""
    refuse_unless(fields, position_embedding_type="absolute", is_decoder=False)
    num_layers = fields.positive_int("num_hidden_layers", 12)
    has_types = fields.get("type_vocab_size") != 0
    return EncoderConfig(
        spec=read_spec(fields, (None,) * num_layers),
        intermediate_size=fields.positive_int("intermediate_size", 3072),
        norm_eps=fields.positive_float("layer_norm_eps", 1e-12),
        activation=read_activation(fields, "hidden_act"),
        num_token_types=fields.positive_int("type_vocab_size", 2) if has_types else 1,
        rotary=(None,) * num_layers,
        names=BERT_NAMES if has_types else replace(BERT_NAMES, token_types=None),
    )


def read_roberta(fields: ConfigFields, first: int | None = None) -> EncoderConfig:
    """RoBERTa, CamemBERT, XLM-R: positions begin at `first`; None: behind that of padding."""
    bert, padding = read_bert(fields), fields.get("pad_token_id")
    if first is None:
        first = (1 if padding is None else int(padding)) + 1
    spec = bert.spec
    if first >= spec.max_model_len:
        raise ModelConfigError(
            f"config: max_position_embeddings is {spec.max_model_len}, positions begin at {first}"
        )
    spec = replace(spec, max_model_len=spec.max_model_len - first)
    return replace(bert, first_position=first, spec=spec)


def read_distilbert(fields: ConfigFields) -> EncoderConfig:
    """DistilBERT: no token types."""
    num_layers = fields.positive_int("n_layers", 6)
    return EncoderConfig(
        spec=read_spec(fields, (None,) * num_layers, hidden="dim", heads="n_heads"),
        intermediate_size=fields.positive_int("hidden_dim", 3072),
        norm_eps=1e-12,
        activation=read_activation(fields, "activation"),
        rotary=(None,) * num_layers,
        names=_DISTILBERT_NAMES,
    )


def bert_head(fields: ConfigFields) -> HeadConfig:
    return HeadConfig(
        pooling="cls", dense="pooler.dense", out="classifier", num_labels=num_labels(fields)
    )


def roberta_head(fields: ConfigFields) -> HeadConfig:
    dense, out = "classifier.dense", "classifier.out_proj"
    return HeadConfig(pooling="cls", dense=dense, out=out, num_labels=num_labels(fields))


def distilbert_head(fields: ConfigFields) -> HeadConfig:
    return HeadConfig(
        pooling="cls",
        dense="pre_classifier",
        activation="relu",
        out="classifier",
        num_labels=num_labels(fields),
    )


_ROBERTAS = (("Roberta", "roberta"), ("Camembert", "camembert"))

FAMILIES = (
    *encoder_family(
        "Bert",
        "bert",
        read_bert,
        bert_head,
        base="bert.",
        unused=("pooler.", "cls.", "classifier."),
        gguf=encoder_gguf("bert", BERT_NAMES),
    ),
    *(
        family
        for stem, model_type in _ROBERTAS
        for family in encoder_family(
            stem,
            model_type,
            read_roberta,
            roberta_head,
            base="roberta.",
            unused=("pooler.", "lm_head.", "classifier."),
        )
    ),
    *encoder_family(
        "DistilBert",
        "distilbert",
        read_distilbert,
        distilbert_head,
        base="distilbert.",
        unused=("vocab_",),
    ),
)
