"""A few sandboxes for one kind of work, so that one call does not wait for a slow one."""

import os
import queue
from collections.abc import Callable

from protocol.sandbox import SandboxProcess


class SandboxPool:
    """Calls take a free process in turn; no more are started than run at once.

    Args:
        make: a process that was not started.
    """

    def __init__(self, make: Callable[[], SandboxProcess], num_processes: int) -> None:
        self._processes = [make() for _ in range(num_processes)]
        self._make_free()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._make_free)

    def _make_free(self) -> None:
        self._free: queue.LifoQueue[SandboxProcess] = queue.LifoQueue()
        for each in self._processes:
            self._free.put(each)

    @property
    def pids(self) -> list[int]:
        """Ids of the running processes."""
        return [each.pid for each in self._processes if each.pid is not None]

    def start(self) -> None:
        """One process, before the first `call`."""
        self._processes[-1].start()

    def call(self, request: bytes) -> bytes:
        """See `SandboxProcess.call`, once a process is free. Raises SandboxRefused, SandboxEnded:
        see there."""
        process = self._free.get()
        try:
            return process.call(request)
        finally:
            self._free.put(process)

    def close(self) -> None:
        """End the processes that are not at work. The next `call` starts another."""
        for each in self._processes:
            each.close()
