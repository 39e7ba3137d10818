"""Notices an engine that has work and makes no progress, and writes down what it does instead."""

import faulthandler
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Self

from engine_core.errors import ExitCode
from engine_core.observers.base import Progress

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 10
_MAX_TICK_S = 5.0


class Watchdog:
    """A thread that follows the loop's progress. Time in which this process is stopped does not
    count.

    Args:
        timeout_s: longest time without progress.
        numbers: the engine's, in words; called while the loop hangs.
        ends_process: exit with NO_PROGRESS after the report, for a restart by the parent.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        timeout_s: float,
        numbers: Callable[[], str],
        ends_process: bool,
    ) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._numbers = numbers
        self._ends_process = ends_process
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        tick_s = min(self._timeout_s / _CHECKS_PER_TIMEOUT, _MAX_TICK_S)
        num_steps, stalled_s, is_reported = -1, 0.0, False
        before_s = time.monotonic()
        while not self._closed.wait(tick_s):
            now_s = time.monotonic()
            # A tick that took longer was a pause of the whole process, such as SIGSTOP.
            stalled_s += min(now_s - before_s, 2 * tick_s)
            before_s = now_s
            if num_steps != self._progress.num_steps:
                num_steps, stalled_s, is_reported = self._progress.num_steps, 0.0, False
            elif stalled_s >= self._timeout_s and not is_reported:
                is_reported = True
                self._report(stalled_s)
                if self._ends_process:
                    os._exit(ExitCode.NO_PROGRESS)

    def _report(self, stalled_s: float) -> None:
        text = (
            f"there is work and no step has ended for {stalled_s:.1f} s (--watchdog-timeout "
            f"{self._timeout_s:g})"
        )
        try:
            with tempfile.NamedTemporaryFile(
                "w", prefix="engine-core-hang-", suffix=".txt", delete=False
            ) as file:
                self._write(file, text)
        except OSError as error:
            logger.error("%s; the report cannot be written: %s; stacks follow", text, error)
            faulthandler.dump_traceback()
        else:
            what_next = "the engine ends" if self._ends_process else "it waits on"
            logger.error("%s; stacks and numbers are in %s; %s", text, file.name, what_next)

    def _write(self, file: IO[str], text: str) -> None:
        file.write(f"engine-core {os.getpid()}: {text}\n\n# last plans\n")
        for plan in list(self._progress.last_plans):
            counts = zip(plan.batch.req_ids, plan.batch.num_scheduled_tokens.tolist(), strict=False)
            file.write(
                f"step {plan.step_id}: {plan.total_num_scheduled_tokens} tokens: "
                f"{', '.join(f'{name} {count}' for name, count in counts)}\n"
            )
        try:
            numbers = self._numbers()
        except Exception as error:  # read beside the loop, which may be in the middle of a change
            numbers = f"cannot be read: {error!r}"
        file.write(f"\n# numbers\n{numbers}\n\n# stacks\n")
        file.flush()
        faulthandler.dump_traceback(file)
