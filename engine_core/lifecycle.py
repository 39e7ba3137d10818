"""When the daemon stops: signals, a drain asked for over the wire, an owner that is gone.

serving --SIGTERM, SIGINT, Drain--> draining --second signal, deadline, no owner--> aborting
"""

import contextlib
import enum
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from types import FrameType

from engine_core.server.transport import ZmqTransport

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """A SIGINT that comes within raises KeyboardInterrupt behind it. Where the making of a socket
    is interrupted, the end of its ZMQ context waits for that socket for ever."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # ignored, or handled
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt


class LifecycleStage(enum.Enum):
    SERVING = enum.auto()
    DRAINING = enum.auto()
    ABORTING = enum.auto()


class Lifecycle:
    """
    Args:
        drain_timeout_s: seconds that running requests get once a drain has begun.
        on_stop: called when serving ends, with the reason.
    """

    def __init__(
        self,
        *,
        drain_timeout_s: float,
        on_stop: Callable[[str], None] = lambda _why: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._on_stop = on_stop
        self._clock = clock
        self._stage = LifecycleStage.SERVING
        self._deadline_s = float("inf")
        self._wakeup: tuple[socket.socket, socket.socket] | None = None
        """The end that the loop waits for, and the one that wakes it."""

    @property
    def stage(self) -> LifecycleStage:
        if self._stage is LifecycleStage.DRAINING and self._clock() >= self._deadline_s:
            logger.warning("the drain timed out after %g s", self._drain_timeout_s)
            self._stage = LifecycleStage.ABORTING
        return self._stage

    def drain(self, why: str) -> None:
        """Take no more requests; finish what is there. A second call changes nothing."""
        if self._stage is LifecycleStage.SERVING:
            logger.info("draining: %s", why)
            self._stage = LifecycleStage.DRAINING
            self._deadline_s = self._clock() + self._drain_timeout_s
            self._on_stop(why)

    def abort(self, why: str) -> None:
        """Stop now. Any thread may call this."""
        logger.info("stopping at once: %s", why)
        if self._stage is LifecycleStage.SERVING:
            self._on_stop(why)
        self._stage = LifecycleStage.ABORTING
        if self._wakeup is not None:
            with contextlib.suppress(OSError):  # it is awake, or over
                self._wakeup[1].send(b"\0")

    @property
    def is_listening(self) -> bool:
        return self._wakeup is not None

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
            self._wakeup = receiver, sender
            transport.watch(receiver.fileno())
            try:
                yield
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(previous_wakeup)
                transport.unwatch(receiver.fileno())
                self._wakeup = None

    def poll(self) -> None:
        """Process what woke the loop; nothing can outside `listen`."""
        if self._wakeup is not None:
            with contextlib.suppress(BlockingIOError):
                self._wakeup[0].recv(4096)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._stage is LifecycleStage.SERVING:
            self.drain(f"{name}, at most {self._drain_timeout_s:g} s; once more aborts")
        else:
            self.abort(f"{name} again")
