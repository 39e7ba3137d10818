"""What is said of an option beside its type and its help, the text below it: the group in `--help`,
limits, sizes as they are typed. `--help` shows the common ones, `--help-all` every one."""

import re
from collections.abc import Sequence
from typing import Any

from cyclopts import Group, Parameter, Token, validators

MODEL = Parameter(group=Group.create_ordered("Model"))
ADAPTERS = Parameter(group=Group.create_ordered("Adapters"))
MULTIMODAL = Parameter(group=Group.create_ordered("Images and sounds"))
CACHE = Parameter(group=Group.create_ordered("KV cache"))
SCHEDULING = Parameter(group=Group.create_ordered("Scheduling"))
ADVANCED_SCHEDULING = Parameter(group=Group.create_ordered("Advanced scheduling"))
SPECULATION = Parameter(group=Group.create_ordered("Speculative decoding"))
DISAGGREGATION = Parameter(group=Group.create_ordered("Disaggregated prefill"))
SERVING = Parameter(group=Group.create_ordered("Serving"))
COMMON = Parameter(show=True)
FLAG = Parameter(negative="")
"""A flag without a --no- form."""

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(text: str) -> int:
    """ "2GiB", "512MB", "1.5g" or a plain number of bytes. Raises ValueError: not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write for instance 2GiB, 512MB or 1000000")
    return int(float(match[1]) * _BYTES[match[2]])


def _size(_type: Any, tokens: Sequence[Token]) -> int:
    return parse_bytes(tokens[0].value)


def at_least(least: float, **more: float) -> Parameter:
    return Parameter(validator=validators.Number(gte=least, **more))


SIZE = Parameter(converter=_size, n_tokens=1)
"""Typed as a size, such as 2GiB, and read as bytes."""
POSITIVE, NOT_NEGATIVE = at_least(1), at_least(0)
