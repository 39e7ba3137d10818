"""The process that owns this engine, such as a client that started it: the engine ends with it,
also during the start, and also if the loop hangs."""

import os
import select
import signal
import sys
import threading
import time

from engine_core.errors import ConfigurationError, ExitCode
from engine_core.lifecycle import Lifecycle

_GRACE_S = 10.0
"""Seconds that the loop gets to abort its requests."""


class Owner:
    """Standard input alone is not enough: another child that the owner forks keeps the pipe open.
    Nor is PR_SET_PDEATHSIG: it strikes when the thread that started the engine ends.
    Raises ConfigurationError: this system cannot watch a process.

    Args:
        watches_stdin: the end of standard input means that the owner is gone.
        pid: so does the end of this process.
    """

    def __init__(self, *, watches_stdin: bool, pid: int | None) -> None:
        self._stdin = sys.stdin.fileno() if watches_stdin else None
        self._is_gone = False
        self._process: int | None = None
        if pid is not None:
            try:
                self._process = os.pidfd_open(pid)
            except ProcessLookupError:
                self._is_gone = True
            except (AttributeError, OSError) as error:
                raise ConfigurationError(
                    f"--parent-pid {pid} cannot be watched on this system ({error}); omit it"
                ) from None

    def is_gone(self, timeout_s: float | None = 0.0) -> bool:
        """Waits for it for at most `timeout_s`; None: without a limit."""
        poll = select.poll()
        for descriptor in (self._stdin, self._process):
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        while not self._is_gone:
            ready = [at for at, _ in poll.poll(None if timeout_s is None else timeout_s * 1e3)]
            self._is_gone = self._process in ready or (
                self._stdin in ready and os.read(self._stdin or 0, 4096) == b""
            )
            if not ready:
                break
        return self._is_gone

    def end_with_it(self, lifecycle: Lifecycle) -> None:
        """A thread aborts what is served, and ends this process if that is not enough."""
        if self._is_gone or (self._stdin, self._process) != (None, None):
            threading.Thread(target=self._end_with_it, args=(lifecycle,), daemon=True).start()

    def _end_with_it(self, lifecycle: Lifecycle) -> None:
        self.is_gone(None)
        is_serving = lifecycle.is_listening
        lifecycle.abort("the program that started this engine stops, or has ended")
        if is_serving:
            time.sleep(_GRACE_S)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # compilers and downloads too
        os._exit(ExitCode.DRAINED)
