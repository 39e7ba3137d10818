"""The base class of all messages."""

import msgspec

WIRE_VERSION = 12
"""Must be equal on both sides. Raise it with any change to a message's fields."""


class Message(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True
):
    """A tagged array on the wire: `[tag, field, field, ...]`.

    Arrays keep messages small and fast; `forbid_unknown_fields` makes version skew an error
    rather than a silent loss. Fields are validated on decode only (msgspec does not check
    constructors), so classes with rules of their own check them in `__post_init__`."""
