"""A command's client, and what it says on stderr while the engine keeps the user waiting."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator

from frontend.async_llm import AsyncLLM
from frontend.cli.options import DaemonOptions, print_fault
from frontend.errors import EngineClientError

_SILENT_S = 1.0
_CHECK_S = 0.05


@contextlib.asynccontextmanager
async def connected(daemon: DaemonOptions, command: str) -> AsyncIterator[AsyncLLM]:
    """A connected client. Once it has waited for a second, a line says for what and until when.

    Args:
        command: its name in the daemon's log.

    Raises:
        UsageError: a time limit that is none.
        EngineClientError: no engine answers.
    """
    llm = daemon.client(command)
    notices = _WaitNotices(llm, daemon)
    try:
        await notices.open()
        yield llm
    finally:
        notices.close()
        await llm.close()


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
        """Connect the client.

        Raises:
            EngineClientError: see `AsyncLLM.open`.
        """
        limit_s = self._options.connect_timeout
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


def _clock(after_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time.time() + after_s))
