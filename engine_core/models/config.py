"""A model's shape and options, read once from its config.json and frozen.

Owns the resolved form. Must not know how families of models spell their options; those who do
are `family_configs` and `rotary_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine_core.layers.feed_forward import Activation
from engine_core.layers.rotary import RotaryConfig
from engine_core.models.errors import ModelConfigError
from engine_core.models.interface import KVCacheSpec


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


class ConfigFields:
    """Typed reading of a config; a null is the same as an absent field.

    Every method raises ModelConfigError for a value of the wrong kind, and for an absent field
    without a default.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def get(self, name: str) -> Any:
        """The raw value, None if absent."""
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is spelled out, be it as null."""
        return name in self._fields

    def positive_int(self, name: str, default: int | None = None) -> int:
        """A whole number above zero."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelConfigError(f"config: {name} is {value!r}, it must be a positive integer")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelConfigError(f"config: {name} is {value!r}, it must be a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"config: {name} is {value!r}, it must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ModelConfigError(f"config: {name} is {value!r}, it must be a string")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object, or None if absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelConfigError(f"config: {name} is {value!r}, it must be an object")
        return value

    def _value(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelConfigError(f"config: {name} is missing; the model cannot be built without")
        return value
