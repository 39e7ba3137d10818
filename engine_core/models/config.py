"""A model's shape and options, resolved once from its config.json and frozen."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_core.layers.config import (
    Activation,
    ExpertConfig,
    InterleavedRows,
    LatentConfig,
    PerLayerConfig,
    QueryScale,
    RecurrentConfig,
    RotaryConfig,
    WeightFactors,
)
from engine_core.models.interface import Feature, ModelSpec

BlockOf = Callable[[Any, int], Any]
"""A `blocks.BlockBuilder` makes with it the `blocks.Block` of a layer."""


def plain_block(build: Any, layer: int) -> Any:
    """Llama's: attention and feed-forward with a norm before each."""
    return build.block(layer, build.attention(layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that building a decoder needs; sequences have one entry a layer.

    Attributes:
        norms_plus_one: see `RMSNorm`.
        norm_bias: whether layer norms of the hidden state have biases; None: they are RMS norms.
        mlp_gated: whether the feed-forward has a gate; with relu2 it has none.
        experts: None where the feed-forward is dense.
        norms_in_float32: see `RMSNorm`.
        embedding_scale, logits_divisor: see `Vocabulary`.
        residual_scale: on what attention and feed-forward add.
        can_be_shared: ranks may each have a part of every layer.
        attention_scale: None: one over the root of the size of a key.
        attention_softcap: scores become `softcap * tanh(scores / softcap)`; None: they stay.
        tied_head: the head is the embedding.
        block: what a layer is.
        recurrent: sizes of layers that keep a state, where ranks can share them.
        latent: sizes of layers that keep latents.
        interleaved: products that checkpoints hold in one tensor, row by row.
        factors: numbers that weights are multiplied by; None: the file's have them in them, and
            they are not known.
        per_layer: embeddings of which each layer has a part; None: there are none.
        lacks: what of `Feature` it has not.
        unused: first parts of the names of tensors that a checkpoint may hold for nothing.
        bidirectional: a token sees the whole prompt, or a window on both sides.
    """

    spec: ModelSpec
    intermediate_size: int
    norm_eps: float
    activation: Activation
    experts: tuple[ExpertConfig | None, ...]
    rotary: tuple[RotaryConfig, ...]
    tied_head: bool
    block: BlockOf = plain_block
    norms_plus_one: bool = False
    norm_bias: bool | None = None
    norms_in_float32: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    mlp_gated: bool = True
    attention_scale: float | None = None
    attention_softcap: float | None = None
    embedding_scale: float | None = None
    final_softcap: float | None = None
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    query_scale: QueryScale | None = None
    can_be_shared: bool = True
    recurrent: RecurrentConfig | None = None
    latent: LatentConfig | None = None
    interleaved: tuple[InterleavedRows, ...] = ()
    factors: tuple[WeightFactors, ...] | None = ()
    per_layer: PerLayerConfig | None = None
    lacks: frozenset[Feature] = frozenset()
    unused: tuple[str, ...] = ()
    bidirectional: bool = False
