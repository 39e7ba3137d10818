"""What systemd is told: ready, stopping, alive, a line of status. One datagram a message to
$NOTIFY_SOCKET, see sd_notify(3)."""

import contextlib
import fcntl
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"
_PINGS_PER_TIMEOUT = 3
_MAX_MESSAGE_BYTES = 4096
_SEND_LIMIT_S = 1.0


class ServiceManager:
    """Takes NOTIFY_SOCKET and WATCHDOG_USEC out of the environment; does nothing without them.

    Under --supervise systemd knows the parent alone. So the engine sends its messages to the parent
    (`relay`, `use`), which passes them on: `NotifyAccess=main` holds, and the parent can say that
    the service lives while the next engine starts."""

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")
        timeout_us = os.environ.pop("WATCHDOG_USEC", "")
        is_meant = os.environ.pop("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.ping_interval_s: float | None = None
        """How often systemd wants to hear that this service lives; None: never."""
        self._socket: socket.socket | None = None
        if address[:1] not in ("/", "@"):
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.settimeout(_SEND_LIMIT_S)
        try:
            self._socket.connect(address.replace("@", "\0", 1) if address[0] == "@" else address)
        except OSError as error:
            logger.warning("systemd cannot be told of readiness: %s: %s", address, error)
            self._socket = None
        if is_meant and timeout_us.isdecimal() and int(timeout_us):
            self.ping_interval_s = int(timeout_us) / 1e6 / _PINGS_PER_TIMEOUT

    def notify(self, *lines: str) -> None:
        """Send lines such as READY. What cannot be sent is lost: systemd has its time limits."""
        if self._socket is not None:
            try:
                self._socket.send("\n".join(lines).encode())
            except OSError as error:
                logger.debug("systemd was not told %s: %s", lines, error)

    def relay(self) -> "Relay | None":
        """For a parent that starts engines; None: there is nobody to tell."""
        return None if self._socket is None else Relay(self)

    def use(self, relay: "Relay") -> None:
        """Send to the parent, in the engine."""
        self._socket = relay.engine_end
        self._socket.settimeout(_SEND_LIMIT_S)

    @contextlib.contextmanager
    def pings(self, num_steps: Callable[[], int]) -> Iterator[None]:
        """Tell that the service lives for as long as `num_steps` changes."""
        if self._socket is None or self.ping_interval_s is None:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._ping, args=(num_steps, over), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _ping(self, num_steps: Callable[[], int], over: threading.Event) -> None:
        before = -1
        while not over.wait(self.ping_interval_s):
            if (now := num_steps()) != before:
                before = now
                self.notify(ALIVE)


class Relay:
    """From the engine to its parent, and on to systemd. What arrives raises SIGIO in the parent."""

    def __init__(self, service_manager: ServiceManager) -> None:
        self._service_manager = service_manager
        self._parent_end, self.engine_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        fcntl.fcntl(self._parent_end, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(self._parent_end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        self.is_serving = False
        self._pinged_s = 0.0

    def pass_on(self) -> float:
        """Returns the seconds until this must be called again; infinity: when something arrives."""
        with contextlib.suppress(BlockingIOError):
            while True:
                text = self._parent_end.recv(_MAX_MESSAGE_BYTES).decode()
                self.is_serving |= text.startswith(READY)
                self._service_manager.notify(text)
        interval_s = self._service_manager.ping_interval_s
        if self.is_serving or interval_s is None:
            return float("inf")
        now_s = time.monotonic()
        if now_s - self._pinged_s >= interval_s:
            self._pinged_s = now_s
            self._service_manager.notify(ALIVE)
        return self._pinged_s + interval_s - now_s
