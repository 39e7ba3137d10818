"""Where the time from launch to ready goes: one phase after the other, without gaps."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

Phase = Literal["imports", "files", "weights", "cache", "warm_up", "serving"]
"""What the start is busy with.

imports: the interpreter, our modules, torch. files: finding the model, its headers and tokenizer.
weights: tensors to the form that steps use. cache: sizes, and memory for keys and values.
warm_up: first steps, captures, compilation. serving: scheduler, messages, sockets."""


class StartPhases:
    """Seconds spent in each phase since the process was launched. What runs beside a phase, in
    another thread, is not counted: only what the start waited for.

    Args:
        launched_s: when the process began, by `now`; default: what the system says.
        now: a monotonic clock in seconds.
    """

    def __init__(
        self, *, launched_s: float | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._launched_s = process_launched_s() if launched_s is None else launched_s
        self._phase: Phase = "imports"
        self._since_s = self._launched_s
        self._spent_s: dict[Phase, float] = {}

    def enter(self, phase: Phase) -> None:
        """End the current phase and begin, or go on with, another."""
        now_s = self._now()
        self._spent_s[self._phase] = self._spent_s.get(self._phase, 0.0) + now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    @property
    def total_s(self) -> float:
        """Seconds from launch to the last `enter`: the sum of all phases."""
        return self._since_s - self._launched_s

    def spent_s(self) -> dict[Phase, float]:
        """Seconds in each phase up to the last `enter`, in the order in which they began."""
        return dict(self._spent_s)


def process_launched_s() -> float:
    """When this process began, by `time.monotonic`.

    Linux says it in clock ticks of 10 ms since the boot, rounded down; one tick is added, so that
    it is never more than a parent can have measured. Elsewhere it is now.

    Source: proc_pid_stat(5), field 22."""
    try:
        # the second field is the program's name in brackets, which may hold blanks and brackets
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_ticks = int(fields[22 - 3])
        ticks_per_s = os.sysconf("SC_CLK_TCK")
        # a thread put to sleep between the two readings makes this less than it is, never more
        boot_before_zero_s = max(
            time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() for _ in range(3)
        )
    except (OSError, ValueError, IndexError, AttributeError):
        return time.monotonic()
    return min(time.monotonic(), (started_ticks + 1) / ticks_per_s - boot_before_zero_s)
