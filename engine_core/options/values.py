"""How an option is declared: its group in `--help`, and sizes as they are typed."""

import re
from collections.abc import Sequence
from typing import Any

from cyclopts import Group, Parameter, Token, validators

AT_LEAST_ONE = validators.Number(gte=1)
AT_LEAST_ZERO = validators.Number(gte=0)

MODEL = Group.create_ordered("Model")
CACHE = Group.create_ordered("KV cache")
SCHEDULING = Group.create_ordered("Scheduling")
ADVANCED_SCHEDULING = Group.create_ordered("Advanced scheduling")
SPECULATION = Group.create_ordered("Speculative decoding")
SERVING = Group.create_ordered("Serving")

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def option(help_text: str, group: Group, *, is_common: bool = False, **more: Any) -> Parameter:
    """One `--option` of the daemon. `--help` shows the common ones, `--help-all` every one."""
    if is_common:
        more["show"] = True
    return Parameter(help=help_text, group=group, **more)


def size_option(help_text: str, group: Group, **more: Any) -> Parameter:
    """One that is typed as a size, such as 2GiB, and read as bytes."""
    return option(help_text, group, converter=_size, n_tokens=1, **more)


def parse_bytes(text: str) -> int:
    """ "2GiB", "512MB", "1.5g" or a plain number of bytes. Raises ValueError: not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write for instance 2GiB, 512MB or 1000000")
    return int(float(match[1]) * _BYTES[match[2]])


def _size(_type: Any, tokens: Sequence[Token]) -> int:
    return parse_bytes(tokens[0].value)
