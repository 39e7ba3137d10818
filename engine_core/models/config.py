"""A model's shape and options, resolved once from its config.json and frozen."""

from dataclasses import dataclass

from engine_core.layers.feed_forward import Activation, ExpertConfig
from engine_core.layers.rotary import RotaryConfig
from engine_core.models.interface import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(KVCacheSpec):
    """Everything that building a decoder needs; sequences have one entry a layer.

    Attributes:
        norms_plus_one: see `RMSNorm`.
        output_norms: attention and feed-forward are normed once more before they are added.
        experts: None where the feed-forward is dense.
        head_norms: q and k are normed within a head before rotation.
        embedding_scale: see `Vocabulary`.
        tied_head: the head is the embedding.
    """

    intermediate_size: int
    norm_eps: float
    norms_plus_one: bool
    output_norms: bool
    activation: Activation
    experts: tuple[ExpertConfig | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    attention_scale: float
    rotary: tuple[RotaryConfig, ...]
    embedding_scale: float | None
    tied_head: bool
    final_softcap: float | None
