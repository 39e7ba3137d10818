"""Typed reading of a config.json, with errors for values of a wrong kind."""

from collections.abc import Mapping
from types import UnionType
from typing import Any

from engine_core.models.errors import ModelConfigError

_LARGEST = {"num_hidden_layers": 10_000, "hidden_size": 1 << 20, "head_dim": 1 << 20}
_LARGEST_INT = 2**31 - 1
_LARGEST_FLOAT = 1e300


class ConfigFields:
    """Typed reading of a config; a null is the same as an absent field.

    Every method raises ModelConfigError for a value of the wrong kind, and for an absent field
    without a default."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigFields":
        """A copy with these in the place of what is not spelled out."""
        return ConfigFields({**defaults, **self._fields})

    def with_values(self, values: Mapping[str, Any]) -> "ConfigFields":
        """A copy with these in the place of whatever is spelled out."""
        return ConfigFields({**self._fields, **values})

    def get(self, name: str) -> Any:
        """The raw value, None if absent."""
        return self._fields.get(name)

    def has(self, name: str) -> bool:
        """Whether the field is spelled out, be it as null."""
        return name in self._fields

    def positive_int(self, name: str, default: int | None = None) -> int:
        """A whole number above zero, of a size that a model can have."""
        value: int = self._value(name, default, int, "a positive integer")
        largest = _LARGEST.get(name, _LARGEST_INT)
        if value > largest:
            raise ModelConfigError(f"config: {name} is {value}, the limit is {largest}")
        return value

    def positive_float(self, name: str, default: float | None = None) -> float:
        """A number above zero."""
        value = self._value(name, default, int | float, "a positive number")
        if value > _LARGEST_FLOAT:
            raise ModelConfigError(f"config: {name} is {value}, it must be a finite number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value: bool = self._value(name, default, bool, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value: str = self._value(name, default, str, "a string")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object, or None if absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelConfigError(f"config: {name} is {value!r}, it must be an object")
        return value

    def _value(self, name: str, default: Any, kind: type | UnionType, wanted: str) -> Any:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelConfigError(f"config: {name} is missing; the model cannot be built without")
        is_truth = isinstance(value, bool)
        is_right = isinstance(value, kind) and is_truth == (kind is bool)
        if not is_right or (not is_truth and not isinstance(value, str) and not value > 0):
            raise ModelConfigError(f"config: {name} is {value!r}, it must be {wanted}")
        return value
