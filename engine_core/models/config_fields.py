"""Typed reading of a config.json, with errors for values of a wrong kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine_core.models.errors import ModelConfigError


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
