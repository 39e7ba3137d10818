"""`engine-core --supervise`: a parent without torch that starts the engine again when it dies.

start ──> engine serves ──drained──> exit 0
  ^            │ fault or signal
  └── delay ───┘ ──too often──> exit 4
"""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable

from engine_core.errors import ConfigurationError, ExitCode
from engine_core.process.oom_kills import count_oom_kills
from engine_core.process.owner import Owner
from engine_core.process.service_manager import ALIVE, Relay, ServiceManager
from engine_core.process.suspects import Suspects

logger = logging.getLogger(__name__)

DEFAULT_MAX_RESTARTS = 10
WINDOW_S = 600.0
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 15.0
_GRACE_S = 10.0
"""What the engine gets behind its drain timeout before it is killed."""
_STOPS = {signal.SIGTERM, signal.SIGINT}
_PR_SET_PDEATHSIG = 1


class RestartLimit:
    """How long to wait before the next start. The first of a window comes at once, each further one
    after twice the delay, at most 15 s. `max_restarts`: within any `WINDOW_S` seconds."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts_s: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Counts a restart. None: there were too many, do not start again."""
        while self._restarts_s and self._restarts_s[0] <= now_s - WINDOW_S:
            self._restarts_s.popleft()
        number = len(self._restarts_s)
        if number >= self._max_restarts:
            return None
        self._restarts_s.append(now_s)
        return min(_FIRST_DELAY_S * 2 ** (number - 1), _LONGEST_DELAY_S) if number else 0.0


def supervise(
    serve: Callable[[Suspects], int],
    *,
    max_restarts: int,
    drain_timeout_s: float,
    owner: Owner,
    service_manager: ServiceManager,
    oom_kills: Callable[[], int] = count_oom_kills,
) -> int:
    """Run `serve` in child processes, one after the other, until one drains or is told to.

    Must be called without threads. Returns in the parent and in each child. May be process 1 of a
    container. Returns the exit code. In a child it is that of `serve`. Raises ConfigurationError:
    this system cannot end a child with its parent.

    Args:
        serve: the engine, given the requests that may have killed it; returns its exit code.
        drain_timeout_s: what the engine gets after SIGTERM, before it is killed 10 s later.
        owner: without it no engine is started again.
    """
    if sys.platform != "linux":
        raise ConfigurationError(
            f"--supervise needs Linux, this is {sys.platform}; omit it, and let the system's "
            "service manager restart engine-core"
        )
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGIO, *_STOPS})
    relay = service_manager.relay()
    limit = RestartLimit(max_restarts)
    suspects = Suspects()
    is_first = True
    while True:
        parent = os.getpid()
        num_oom_kills = oom_kills()
        child = os.fork()
        if not child:
            end_with(parent)
            os.setsid()  # Ctrl-C is for the parent, which drains the engine
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            if relay is not None:
                service_manager.use(relay)
            return serve(suspects)
        code, is_stopping = _wait(child, drain_timeout_s, relay)
        by_oom_killer = code == -signal.SIGKILL and oom_kills() > num_oom_kills
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # compilers and downloads that it left
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        how += ", out of memory" if by_oom_killer else ""
        if code == ExitCode.DRAINED or (is_stopping and -code in _STOPS) or owner.is_gone():
            return ExitCode.DRAINED
        if is_stopping:
            logger.error("the engine did not drain: %s", how)
            return ExitCode.FAULT
        if code == ExitCode.WRONG_OPTIONS or (code == ExitCode.START_FAILED and is_first):
            return code  # the next start would fail alike
        is_first = False
        if relay is not None:
            relay.is_serving = False
        suspects.count_death(code, by_oom_killer=by_oom_killer)
        delay_s = limit.next_delay_s(time.monotonic())
        if delay_s is None:
            logger.error(
                "the engine died (%s) after %d restarts in %g s; it is not started again: see its "
                "log above, or raise --max-restarts",
                how,
                max_restarts,
                WINDOW_S,
            )
            return ExitCode.TOO_MANY_RESTARTS
        logger.error("the engine died (%s); it is started again in %g s", how, delay_s)
        service_manager.notify(ALIVE, f"STATUS=the engine died ({how}); it is started again")
        if _next_signal(_STOPS, time.monotonic() + delay_s, relay) is not None:
            return ExitCode.DRAINED


def _next_signal(
    numbers: set[signal.Signals], limit_s: float, relay: Relay | None
) -> signal.struct_siginfo | None:
    """One of `numbers`, or None when the clock shows `limit_s`. systemd is told meanwhile what the
    engine says, and that the service lives while no engine serves."""
    while True:
        wait_s = min(max(0.0, limit_s - time.monotonic()), 1e6)
        if relay is not None:
            wait_s = min(wait_s, relay.pass_on())
        received = signal.sigtimedwait({*numbers, signal.SIGIO}, wait_s)
        if received is not None and received.si_signo != signal.SIGIO:
            return received
        if time.monotonic() >= limit_s:
            return None


def _wait(child: int, drain_timeout_s: float, relay: Relay | None) -> tuple[int, bool]:
    """The child's exit code (-N: killed by signal N), and whether it was told to stop before."""
    kill_s = float("inf")
    is_stopping = False
    while True:
        received = _next_signal({signal.SIGCHLD, *_STOPS}, kill_s, relay)
        if received is None and is_stopping:
            os.kill(child, signal.SIGKILL)
            kill_s = float("inf")
        elif received is not None and received.si_signo in _STOPS:
            os.kill(child, signal.SIGTERM)
            if not is_stopping:
                is_stopping, kill_s = True, time.monotonic() + drain_timeout_s + _GRACE_S
        while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):  # orphans too, as process 1
            if ended[0] == child:
                return os.waitstatus_to_exitcode(ended[1]), is_stopping


def end_with(parent: int) -> None:
    """The kernel kills this process when its parent dies, however that dies.

    Source: prctl(2), PR_SET_PDEATHSIG."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) or os.getppid() != parent:
        os._exit(ExitCode.FAULT)
