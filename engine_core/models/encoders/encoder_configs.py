"""What building an encoder needs, and what their families read alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from engine_core.layers.config import InterleavedRows, RotaryConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import paged_keys

if TYPE_CHECKING:
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
    embedding_norm: str | None
    qkv: tuple[str, ...]
    attention_output: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    output_norm: str
    final_norm: str | None = None
    embedding_projection: str | None = None
    distance_bias: str | None = None


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


@dataclass(frozen=True, slots=True)
class TaskAdapters:
    """Low-rank changes of a checkpoint's weights, a set for each of its tasks.

    Attributes:
        task: the one whose changes are added to the weights; None: no change is.
        scale: on the changes.
    """

    task: int | None
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DisentangledConfig:
    """How attention takes distances, see `DistanceEmbeddings`.

    Attributes:
        names: of the embeddings, and of their norm; None: there is none.
        projections: prefixes of what makes queries, then keys of them; empty: those of tokens do.
    """

    names: tuple[str, str | None]
    projections: tuple[str, ...]
    span: int
    max_distance: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Everything that building an encoder needs; sequences have one entry a layer. Windows reach to
    both sides.

    Attributes:
        rms_norm: norms have no mean and no bias.
        pre_norm: norms stand before attention and feed-forward, else behind their sums.
        gated: see `EncoderFeedForward`.
        first_position: rows of the table of positions that no position has.
        weights_of_layers: of each layer the number in names of its tensors; empty: its own.
        embedding_size: of words before they are projected; None: the spec's hidden size.
        num_distance_buckets: of `DistanceBias`, where names have one.
        rotary: None where positions are embedded.
        interleaved: products that checkpoints have in one tensor.
        task_adapters: None where checkpoints have none.
        attention_scale: of scores; None: one over the root of a head's size.
        disentangled: None: distances of tokens have no queries and keys.
        head: None where there is none.
    """

    spec: ModelSpec
    intermediate_size: int
    norm_eps: float
    activation: Activation
    rms_norm: bool = False
    pre_norm: bool = False
    gated: bool = False
    attention_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    norm_bias: bool = True
    weights_of_layers: tuple[int, ...] = ()
    embedding_size: int | None = None
    num_token_types: int = 1
    num_distance_buckets: int = 0
    first_position: int = 0
    rotary: tuple[RotaryConfig | None, ...]
    interleaved: tuple[InterleavedRows, ...] = ()
    names: EncoderNames
    attention_scale: float | None = None
    disentangled: DisentangledConfig | None = None
    head: HeadConfig | None = None
    task_adapters: TaskAdapters | None = None


def token_head(fields: ConfigFields) -> HeadConfig:
    """A product of every token."""
    labels = num_labels(fields)
    return HeadConfig(pooling="tokens", dense=None, out="classifier", num_labels=labels)


def num_labels(fields: ConfigFields) -> int:
    """How many labels, as transformers counts them: the names' number, else two."""
    names = fields.mapping("id2label")
    return len(names) if names else fields.positive_int("num_labels", 2)


def read_spec(
    fields: ConfigFields,
    windows: tuple[int | None, ...],
    *,
    hidden: str = "hidden_size",
    heads: str = "num_attention_heads",
    vocab_size: int = 30_522,
    max_model_len: int = 512,
) -> ModelSpec:
    """The spec with a layer for each window. Names of fields, and the family's defaults."""
    hidden_size, num_heads = fields.positive_int(hidden, 768), fields.positive_int(heads, 12)
    if hidden_size % num_heads:
        raise ModelConfigError(
            f"config: {hidden} is {hidden_size}, not a multiple of the {num_heads} heads"
        )
    return ModelSpec(
        layers=paged_keys(num_heads, hidden_size // num_heads, windows),
        num_query_heads=num_heads,
        hidden_size=hidden_size,
        vocab_size=fields.positive_int("vocab_size", vocab_size),
        max_model_len=fields.positive_int("max_position_embeddings", max_model_len),
    )


def read_activation(fields: ConfigFields, name: str, *, gated: bool = False) -> Activation:
    wanted = fields.text(name, "gelu")
    known = [each for each in _ACTIVATIONS if not (gated and each == "relu")]
    if wanted not in known:
        raise UnsupportedArchitecture(
            f'{name} "{wanted}" is not supported; supported: {", ".join(known)}'
        )
    return _ACTIVATIONS[wanted]


def refuse_unless(fields: ConfigFields, **allowed: object) -> None:
    """Raises UnsupportedArchitecture: a field is spelled out with another value."""
    for name, value in allowed.items():
        found = fields.get(name)
        if found is not None and found != value:
            raise UnsupportedArchitecture(f"{name} {found!r} is not supported, only {value!r}")
