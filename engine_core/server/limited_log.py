"""Log lines that a client can cause: their number is bounded, whatever it sends."""

import logging
import math
from collections.abc import Callable

from protocol.logs import printable

_INTERVAL_S = 1.0
_MAX_CHARS = 500


class LimitedLog:
    """One line a second of each kind; the next one says how many were left out before it.
    `clock`: seconds."""

    def __init__(self, logger: logging.Logger, level: int, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._level = level
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}
        """By kind: when its last line was written, and how many were left out since."""
        self.num_events = 0

    def log(self, kind: str, text: str, *, exc_info: bool = False) -> None:
        """`kind` is one of a few names; `text` is cut where it is too long for a line, and escaped
        where it has line ends. `exc_info`: the traceback of the exception that is handled."""
        self.num_events += 1
        now_s = self._clock()
        logged_s, num_left_out = self._last.get(kind, (-math.inf, 0))
        if now_s - logged_s < _INTERVAL_S:
            self._last[kind] = (logged_s, num_left_out + 1)
            return
        self._last[kind] = (now_s, 0)
        more = f" (and {num_left_out} more like it before)" if num_left_out else ""
        line = printable(text[:_MAX_CHARS])
        self._logger.log(self._level, "%.*s%s", _MAX_CHARS, line, more, exc_info=exc_info)
