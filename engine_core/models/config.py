"""A model's shape and options, resolved once from its config.json and frozen."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.layers.feed_forward import Activation
from engine_core.layers.rotary import RotaryConfig
from engine_core.models.expert_tensors import ExpertNaming
from engine_core.models.interface import KVCacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """What one layer's experts are.

    Attributes:
        top_k: experts of a token.
        intermediate_size: of one expert.
        renormalise: the weights of a token's experts are made to sum to one.
        round_weights: they are rounded to the model's dtype before they are used.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    round_weights: bool
    naming: ExpertNaming


Experts = tuple[ExpertConfig | None, ...]
"""By layer; None where the feed-forward is dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that building a decoder needs; sequences have one entry a layer.

    Attributes:
        head_norms: q and k are normed within a head before rotation.
        sliding_windows: tokens that a query sees, itself included; None for all.
        tied_head: the head is the embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    activation: Activation
    experts: Experts
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    attention_scale: float
    sliding_windows: tuple[int | None, ...]
    rotary: tuple[RotaryConfig, ...]
    max_model_len: int
    tied_head: bool
    final_softcap: float | None

    @property
    def kv_cache_spec(self) -> KVCacheSpec:
        """The part that cache and runner need."""
        return KVCacheSpec(
            num_layers=self.num_layers,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            sliding_windows=self.sliding_windows,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
        )
