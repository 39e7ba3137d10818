"""What `engine-client http` is told about daemons that it starts."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from frontend.errors import InvalidInput
from protocol.programs import python_module

_DURATION = re.compile(r"-?(\d+(\.\d+)?|(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+)")
_FOR_EVER_S = 10 * 365 * 86400.0
"""Longer is the same, and can still be added to a date."""
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class OnDemandOptions:
    """Options of models given as --model NAME."""

    keep_alive: Annotated[str, Parameter(allow_leading_hyphen=True)] = "5m"
    """How long a started daemon may be idle: seconds or as 1h30m; 0: not at all, -1: for ever."""
    startup_timeout: float = 600.0
    """Seconds for a started daemon to get ready, after its download."""
    engine_options: Annotated[Sequence[str], Parameter(parse=False)] = ()
    command: Annotated[Sequence[str], Parameter(parse=False)] = field(
        default_factory=lambda: python_module("engine_core.cli")
    )

    @property
    def keep_alive_s(self) -> float:
        """Raises InvalidInput: it is none."""
        return keep_alive_seconds(self.keep_alive, name="--keep-alive")

    def check(self) -> None:
        """Raises InvalidInput: one of them is outside its limits."""
        _ = self.keep_alive_s
        if not 0 < self.startup_timeout < math.inf:
            raise InvalidInput(
                f"--startup-timeout is {self.startup_timeout:g}, it must be a number above 0"
            )


def keep_alive_seconds(value: str | float, *, name: str = "keep_alive") -> float:
    """Ollama's `keep_alive`: seconds or a text such as "1h30m"; below 0, and above ten years: for
    ever (infinity).

    Raises:
        InvalidInput: it is neither.
    """
    if isinstance(value, str):
        if not _DURATION.fullmatch(value):
            raise InvalidInput(f'{name} is {value!r:.100}, it must be like 300, "5m" or -1')
        parts = re.findall(r"([\d.]+)([a-zµ]+)", value)
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        seconds = -seconds if value.startswith("-") else seconds
        value = seconds if parts else float(value)
    if value != value:  # NaN; isnan takes no integer of 400 digits
        raise InvalidInput(f'{name} is {value}, it must be like 300, "5m" or -1')
    return float(value) if 0 <= value <= _FOR_EVER_S else math.inf
