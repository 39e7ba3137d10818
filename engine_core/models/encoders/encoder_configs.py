"""How each family of encoders names its options and tensors, with the defaults of transformers 5.
An option that changes the arithmetic and is not computed here raises UnsupportedArchitecture."""

from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from engine_core.layers.rotary import RotaryConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.interface import KVCacheSpec
from engine_core.models.rotary_config import read_rotary_by_layer_type
from kernels.interface.operations import Activation

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Prefixes in a checkpoint; those of a layer have {} for its number. Several are one product.
    None: there is no such tensor."""

    words: str
    positions: str | None
    token_types: str | None
    embedding_norm: str
    qkv: tuple[str, ...]
    attention_output: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    output_norm: str
    final_norm: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """`out(norm(activation(dense(x))))`, x of one token, of a mean, or of every token.

    Attributes:
        dense: its prefix; None: x goes into `out`.
        norm: likewise.
    """

    pooling: Literal["cls", "mean", "tokens"]
    dense: str | None
    dense_bias: bool = True
    activation: Activation | Literal["tanh"] = "tanh"
    norm: str | None = None
    out: str
    num_labels: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig(KVCacheSpec):
    """Everything that building an encoder needs; sequences have one entry a layer. Windows reach to
    both sides.

    Attributes:
        pre_norm: norms stand before attention and feed-forward, else behind their sums.
        gated: see `EncoderFeedForward`.
        first_position: rows of the table of positions that no position has.
        rotary: None where positions are embedded.
        head: None where there is none.
    """

    hidden_size: int
    intermediate_size: int
    norm_eps: float
    activation: Activation
    pre_norm: bool = False
    gated: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    num_token_types: int = 1
    first_position: int = 0
    rotary: tuple[RotaryConfig | None, ...]
    names: EncoderNames
    head: HeadConfig | None = None


_BERT_NAMES = EncoderNames(
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
_MODERNBERT_NAMES = EncoderNames(
    words="embeddings.tok_embeddings",
    positions=None,
    token_types=None,
    embedding_norm="embeddings.norm",
    qkv=("layers.{}.attn.Wqkv",),
    attention_output="layers.{}.attn.Wo",
    attention_norm="layers.{}.attn_norm",
    up=("layers.{}.mlp.Wi",),
    down="layers.{}.mlp.Wo",
    output_norm="layers.{}.mlp_norm",
    final_norm="final_norm",
)


def read_bert(fields: ConfigFields) -> EncoderConfig:
    """BERT, MiniLM and others that share its code."""
    _refuse(fields, position_embedding_type="absolute", is_decoder=False)
    num_layers = fields.positive_int("num_hidden_layers", 12)
    return EncoderConfig(
        num_layers=num_layers,
        **_heads(fields, "hidden_size", "num_attention_heads"),
        sliding_windows=(None,) * num_layers,
        vocab_size=fields.positive_int("vocab_size", 30_522),
        max_model_len=fields.positive_int("max_position_embeddings", 512),
        intermediate_size=fields.positive_int("intermediate_size", 3072),
        norm_eps=fields.positive_float("layer_norm_eps", 1e-12),
        activation=_activation(fields, "hidden_act"),
        num_token_types=fields.positive_int("type_vocab_size", 2),
        rotary=(None,) * num_layers,
        names=_BERT_NAMES,
    )


def read_roberta(fields: ConfigFields) -> EncoderConfig:
    """RoBERTa, XLM-R, CamemBERT: positions begin behind that of padding."""
    bert, padding = read_bert(fields), fields.get("pad_token_id")
    first = (1 if padding is None else int(padding)) + 1
    if first >= bert.max_model_len:
        raise ModelConfigError(
            f"config: max_position_embeddings is {bert.max_model_len}, positions begin at {first}"
        )
    return replace(bert, first_position=first, max_model_len=bert.max_model_len - first)


def read_distilbert(fields: ConfigFields) -> EncoderConfig:
    """DistilBERT: no token types."""
    num_layers = fields.positive_int("n_layers", 6)
    return EncoderConfig(
        num_layers=num_layers,
        **_heads(fields, "dim", "n_heads"),
        sliding_windows=(None,) * num_layers,
        vocab_size=fields.positive_int("vocab_size", 30_522),
        max_model_len=fields.positive_int("max_position_embeddings", 512),
        intermediate_size=fields.positive_int("hidden_dim", 3072),
        norm_eps=1e-12,
        activation=_activation(fields, "activation"),
        rotary=(None,) * num_layers,
        names=_DISTILBERT_NAMES,
    )


def read_modernbert(fields: ConfigFields) -> EncoderConfig:
    """ModernBERT: norms before, rotation, a window in two layers of three, a gate."""
    num_layers = fields.positive_int("num_hidden_layers", 22)
    heads = _heads(fields, "hidden_size", "num_attention_heads", 768, 12)
    every = fields.positive_int("global_attn_every_n_layers", 3)
    types = fields.get("layer_types") or [
        "sliding_attention" if layer % every else "full_attention" for layer in range(num_layers)
    ]
    if len(types) != num_layers or set(types) - {"sliding_attention", "full_attention"}:
        raise ModelConfigError(f"config: layer_types are {types!r} for {num_layers} layers")
    rotary = read_rotary_by_layer_type(
        fields,
        head_size=heads["head_size"],
        full_theta=fields.positive_float("global_rope_theta", 160_000.0),
        sliding_theta=fields.positive_float("local_rope_theta", 10_000.0),
    )
    window = fields.positive_int("local_attention", 128) // 2 + 1
    return EncoderConfig(
        num_layers=num_layers,
        **heads,
        sliding_windows=tuple(window if kind == "sliding_attention" else None for kind in types),
        vocab_size=fields.positive_int("vocab_size", 50_368),
        max_model_len=fields.positive_int("max_position_embeddings", 8192),
        intermediate_size=fields.positive_int("intermediate_size", 1152),
        norm_eps=fields.positive_float("norm_eps", 1e-5),
        activation=_activation(fields, "hidden_activation"),
        pre_norm=True,
        gated=True,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        norm_bias=fields.flag("norm_bias", False),
        rotary=tuple(rotary[kind] for kind in types),
        names=_MODERNBERT_NAMES,
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


def modernbert_head(fields: ConfigFields) -> HeadConfig:
    pooling = fields.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ModelConfigError(f"config: classifier_pooling is {pooling!r}, not cls or mean")
    return HeadConfig(
        pooling="cls" if pooling == "cls" else "mean",
        dense="head.dense",
        dense_bias=fields.flag("classifier_bias", False),
        activation=_activation(fields, "classifier_activation"),
        norm="head.norm",
        out="classifier",
        num_labels=num_labels(fields),
    )


def token_head(fields: ConfigFields) -> HeadConfig:
    """A product of every token."""
    labels = num_labels(fields)
    return HeadConfig(pooling="tokens", dense=None, out="classifier", num_labels=labels)


def modernbert_token_head(fields: ConfigFields) -> HeadConfig:
    return replace(modernbert_head(fields), pooling="tokens")


def num_labels(fields: ConfigFields) -> int:
    """As transformers counts them: the names' number, else two."""
    names = fields.mapping("id2label")
    return len(names) if names else fields.positive_int("num_labels", 2)


class _Heads(TypedDict):
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int


def _heads(
    fields: ConfigFields,
    hidden: str,
    heads: str,
    default_hidden: int = 768,
    default_heads: int = 12,
) -> _Heads:
    hidden_size = fields.positive_int(hidden, default_hidden)
    num_heads = fields.positive_int(heads, default_heads)
    if hidden_size % num_heads:
        raise ModelConfigError(
            f"config: {hidden} is {hidden_size}, not a multiple of the {num_heads} heads"
        )
    return {
        "hidden_size": hidden_size,
        "num_query_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": hidden_size // num_heads,
    }


def _activation(fields: ConfigFields, name: str) -> Activation:
    wanted = fields.text(name, "gelu")
    if wanted not in _ACTIVATIONS:
        raise UnsupportedArchitecture(
            f'{name} "{wanted}" is not supported; supported: {", ".join(_ACTIVATIONS)}'
        )
    return _ACTIVATIONS[wanted]


def _refuse(fields: ConfigFields, **allowed: object) -> None:
    """Raises UnsupportedArchitecture: a field is spelled out with another value."""
    for name, value in allowed.items():
        found = fields.get(name)
        if found is not None and found != value:
            raise UnsupportedArchitecture(f"{name} {found!r} is not supported, only {value!r}")
