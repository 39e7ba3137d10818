"""A command's client, and what it says on stderr while the engine keeps the user waiting."""

import asyncio
import contextlib
import dataclasses
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from frontend.async_llm import AsyncLLM
from frontend.cli.options import DEFAULT_CONNECT_S, DaemonOptions, print_fault
from frontend.errors import EngineClientError, EngineUnavailable
from protocol.addresses import default_address
from protocol.running_daemons import running_daemons

_SILENT_S = 1.0
_CHECK_S = 0.05
_STARTED_S = 10.0
"""From a daemon's command to its socket, as with `engine-core ... &` before a client's command."""


@contextlib.asynccontextmanager
async def connected(daemon: DaemonOptions, command: str) -> AsyncIterator[AsyncLLM]:
    """A connected client. Once it has waited for a second, a line says for what and until when.

    Args:
        command: its name in the daemon's log.

    Raises:
        UsageError: a time limit that is none.
        EngineClientError: no engine answers.
    """
    daemon = or_the_only_one(daemon)
    llm = daemon.client(command)
    notices = _WaitNotices(llm, daemon)
    try:
        try:
            await notices.open()
        except EngineUnavailable as error:
            raise _with_what_runs(error, daemon) from None
        yield llm
    finally:
        notices.close()
        await llm.close()


def or_the_only_one(daemon: DaemonOptions) -> DaemonOptions:
    """With the address of this user's only daemon, as `serve` and `run` start it, where none was
    asked for, and none listens or starts at the default one."""
    if daemon.address is not None:
        return daemon
    default = default_address()
    if not (_is_listened_at(default) or _is_being_started(default)):
        running = running_daemons()
        if len(running) == 1 and running[0].is_ready and running[0].address.startswith("ipc://"):
            (only,) = running
            print_fault(f"talking with {only.asked or only.model} at {only.address}")
            return dataclasses.replace(daemon, address=only.address)
    return daemon


def _with_what_runs(error: EngineUnavailable, daemon: DaemonOptions) -> EngineUnavailable:
    """With this user's daemons, as `serve` starts them, where no address was asked for."""
    running = [each for each in running_daemons() if each.is_ready]
    if daemon.address is not None or not running:
        return error
    text = ", ".join(f"--address {each.address} ({each.asked or each.model})" for each in running)
    return EngineUnavailable(f"{error}, or talk with one of yours that run: {text}")


class _WaitNotices(logging.Handler):
    """Belongs to one client, on whose event loop it is made. What the library logs tells it of a
    lost engine."""

    def __init__(self, llm: AsyncLLM, options: DaemonOptions) -> None:
        super().__init__(logging.WARNING)
        self._llm = llm
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        logging.getLogger("frontend").addHandler(self)

    async def open(self) -> None:
        """Connect the client, once a daemon that starts has started.

        Raises:
            EngineClientError: see `AsyncLLM.open`.
        """
        limit_s = self._options.connect_timeout or DEFAULT_CONNECT_S
        if len(self._llm.addresses) == 1:
            try:
                async with asyncio.timeout(self._options.connect_timeout):
                    await _has_started(self._llm.address)
            except TimeoutError:
                raise EngineUnavailable(
                    f"the daemon at {self._llm.address} is still starting (waited {limit_s:g} s); "
                    "try again later, or raise --connect-timeout"
                ) from None
        text = (
            f"waiting for an engine to answer at {self._llm.address}, until {_clock(limit_s)} "
            f"(--connect-timeout {limit_s:g})"
        )
        notice = self._loop.call_later(_SILENT_S, print_fault, text)
        try:
            await self._llm.open()
        finally:
            notice.cancel()

    def close(self) -> None:
        logging.getLogger("frontend").removeHandler(self)
        for task in self._tasks:
            task.cancel()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        if self._llm.session.requests.num_in_flight and not self._tasks:
            limit_s = self._options.reconnect_timeout
            text = (
                f"{record.getMessage()}; waiting for it to come back, until {_clock(limit_s)} "
                f"(--reconnect-timeout {limit_s:g})"
            )
            task = self._loop.create_task(self._say_if_still_lost(text))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _say_if_still_lost(self, text: str) -> None:
        await asyncio.sleep(_SILENT_S)
        try:
            await asyncio.wait_for(self._llm.ready(), _CHECK_S)
        except TimeoutError:
            if sys.stderr.isatty():
                sys.stderr.write("\n")  # an answer stands on the line
            print_fault(text)
        except EngineClientError:
            pass  # the request reports it


async def _has_started(address: str) -> None:
    """Return when no daemon is starting that may come to listen there."""
    began_s, is_said = time.monotonic(), False
    while True:
        waited_s = time.monotonic() - began_s
        if not any(each.address == address and not each.is_ready for each in running_daemons()):
            is_late = waited_s > _STARTED_S
            if is_late or _is_listened_at(address) or not _is_being_started(address):
                return
        if waited_s > _SILENT_S and not is_said:
            is_said = True
            print_fault(f"waiting for the daemon at {address}, which is starting")
        await asyncio.sleep(_CHECK_S)


def _is_being_started(address: str) -> bool:
    """Whether there is a process `engine-core` with this address, in what the system shows."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            words = path.read_bytes().decode(errors="replace").split("\0")
            if any(word.endswith(("/engine-core", "engine_core.cli")) for word in words[:4]):
                _, _, bind = "=".join(words).partition("--bind=")
                if (bind.partition("=")[0] or default_address()) == address:
                    return True
    return False


def _is_listened_at(address: str) -> bool:
    """False only for a Unix socket that is not there, or nobody's any more."""
    if not address.startswith("ipc://"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(address.removeprefix("ipc://"))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            pass  # too long, or forbidden: the client says it
    return True


def _clock(after_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + after_s))
