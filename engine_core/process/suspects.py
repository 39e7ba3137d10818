"""What may kill the engine: the requests in the step in flight when it died, and the grammars that
were being compiled. The engine writes them to memory that it shares with its parent, which
counts."""

import mmap
import signal
import threading
from array import array
from collections import Counter
from collections.abc import Collection

_MAX_STEPS = 2
"""Steps in flight."""
_MAX_REQUESTS = 4096
_SLOT = 1 + _MAX_REQUESTS
_MAX_COMPILED = 8
"""Most grammars that are compiled at the same time."""
_NUM_DEATHS = 2
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


class Suspects:
    """Made by the parent, before it starts the first engine. A request is known by a fingerprint of
    what it asks for, as its id changes when a client sends it again.

        steps     [count, fingerprint, fingerprint ...] [count, ...]    8 bytes each, a slot a step
        compiled  [fingerprint or 0] ...    of contents, not of requests
    """

    def __init__(self) -> None:
        self._steps = memoryview(mmap.mmap(-1, 8 * _MAX_STEPS * _SLOT)).cast("Q")
        self._compiled = memoryview(mmap.mmap(-1, 8 * _MAX_COMPILED)).cast("Q")
        self._lock = threading.Lock()
        self._deaths: Counter[int] = Counter()
        self.refused: set[int] = set()
        """Those that were alone in the step, or compiled alone, when they died once more as
        suspects."""

    def is_suspect(self, fingerprint: int) -> bool:
        return self._deaths[fingerprint] >= _NUM_DEATHS

    def begin_step(self, step_id: int, fingerprints: Collection[int]) -> None:
        """Note a step's requests, in the engine, before the step is launched."""
        begin = step_id % _MAX_STEPS * _SLOT
        values = array("Q", fingerprints)[:_MAX_REQUESTS]
        self._steps[begin + 1 : begin + 1 + len(values)] = memoryview(values)
        self._steps[begin] = len(values)

    def end_step(self, step_id: int) -> None:
        """Note, in the engine, that the step did not kill it."""
        self._steps[step_id % _MAX_STEPS * _SLOT] = 0

    def begin_compile(self, fingerprint: int) -> None:
        """Note a grammar, in the engine, on any thread, before it is compiled."""
        with self._lock:
            if 0 in self._compiled:
                self._compiled[[*self._compiled].index(0)] = fingerprint

    def end_compile(self, fingerprint: int) -> None:
        """Note, in the engine, that compiling is over, if it has begun."""
        with self._lock:
            for place, noted in enumerate(self._compiled):
                if noted == fingerprint:
                    self._compiled[place] = 0

    def count_death(self, code: int, *, by_oom_killer: bool = False) -> None:
        """In the parent: the engine ended with this exit code, -N for signal N. SIGTERM, and
        SIGKILL unless `by_oom_killer`, come from outside and say nothing about requests. While
        something was compiled the requests of steps are not counted."""
        found = {*self._compiled} - {0}
        self._compiled[:] = memoryview(array("Q", [0] * _MAX_COMPILED))
        is_compiled = bool(found)
        for begin in range(0, _MAX_STEPS * _SLOT, _SLOT):
            if not is_compiled:
                found.update(self._steps[begin + 1 : begin + 1 + self._steps[begin]])
            self._steps[begin] = 0
        if code in _FROM_OUTSIDE and not by_oom_killer:
            return
        if len(found) == 1:
            self.refused.update(filter(self.is_suspect, found))
        self._deaths.update(found)
