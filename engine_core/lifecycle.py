"""When the daemon stops: signals, a drain asked for over the wire, a parent that died.

serving --SIGTERM, SIGINT, Drain--> draining --second signal, deadline, end of stdin--> aborting
"""

import contextlib
import enum
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType

from engine_core.server.transport import ZmqTransport

logger = logging.getLogger(__name__)


class Stage(enum.Enum):
    SERVING = enum.auto()
    DRAINING = enum.auto()
    ABORTING = enum.auto()


class Lifecycle:
    """
    Args:
        drain_timeout_s: seconds that running requests get once a drain has begun.
        exit_on_stdin_eof: drain and abort at once when standard input closes.
    """

    def __init__(
        self,
        *,
        drain_timeout_s: float,
        exit_on_stdin_eof: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._exit_on_stdin_eof = exit_on_stdin_eof
        self._clock = clock
        self._stage = Stage.SERVING
        self._deadline_s = float("inf")
        self._transport: ZmqTransport | None = None
        self._wakeup: socket.socket | None = None

    @property
    def stage(self) -> Stage:
        if self._stage is Stage.DRAINING and self._clock() >= self._deadline_s:
            logger.warning("the drain timed out after %g s", self._drain_timeout_s)
            self._stage = Stage.ABORTING
        return self._stage

    def drain(self, why: str) -> None:
        """Take no more requests; finish what is there. A second call changes nothing."""
        if self._stage is Stage.SERVING:
            logger.info("draining: %s", why)
            self._stage = Stage.DRAINING
            self._deadline_s = self._clock() + self._drain_timeout_s

    def abort(self, why: str) -> None:
        """Stop now."""
        logger.info("aborting: %s", why)
        self._stage = Stage.ABORTING

    @contextlib.contextmanager
    def listen(self, transport: ZmqTransport) -> Iterator[None]:
        """Handle SIGTERM and SIGINT, and wake the loop's wait when one arrives."""
        receiver, sender = socket.socketpair()
        with receiver, sender:
            receiver.setblocking(False)
            sender.setblocking(False)
            previous_wakeup = signal.set_wakeup_fd(sender.fileno())
            previous = {
                number: signal.signal(number, self._on_signal)
                for number in (signal.SIGTERM, signal.SIGINT)
            }
            self._wakeup, self._transport = receiver, transport
            transport.watch(receiver.fileno())
            if self._exit_on_stdin_eof:
                transport.watch(sys.stdin.fileno())
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(previous_wakeup)
                transport.unwatch(receiver.fileno())
                self._wakeup = self._transport = None

    def poll(self) -> None:
        """Process what woke the loop; nothing can outside `listen`."""
        if self._wakeup is None or self._transport is None:
            return
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        if self._exit_on_stdin_eof and _stdin_is_closed():
            self._exit_on_stdin_eof = False
            self._transport.unwatch(sys.stdin.fileno())
            self.abort("the parent closed standard input")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._stage is Stage.SERVING:
            self.drain(f"{name}, at most {self._drain_timeout_s:g} s; once more aborts")
        else:
            self.abort(f"{name} again")


def _stdin_is_closed() -> bool:
    descriptor = sys.stdin.fileno()
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and os.read(descriptor, 4096) == b""
