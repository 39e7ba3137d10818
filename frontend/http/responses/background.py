"""Responses that are made without their callers: they go on when the connection ends."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from frontend.http.api_errors import ApiError, api_error
from frontend.http.event_stream import event
from frontend.http.exchange import Exchange
from frontend.http.responses import bodies
from frontend.http.responses.writer import ResponseWriter

logger = logging.getLogger(__name__)

_MOST_RUNS = 1024


class BackgroundRun:
    """One of them.

    Args:
        owner: the caller who may read and cancel it; None: everybody.
        keep: called when it is over, with the events of its stream.
        streams: whether its events can be read, also from the start.
        unread_timeout_s: cancelled when nobody has read them for so long; None: never.
    """

    def __init__(
        self,
        owner: str | None,
        writer: ResponseWriter,
        keep: Callable[[list[bytes] | None], Awaitable[None]],
        *,
        streams: bool,
        unread_timeout_s: float | None = None,
    ) -> None:
        self.owner = owner
        self.writer = writer
        self.streams = streams
        self.events: list[bytes] = []
        self.is_over = False
        self._keep = keep
        self._more = asyncio.Event()
        self._is_cancelled = False
        self._task: asyncio.Task[None] | None = None
        self._unread_timeout_s = unread_timeout_s
        self._num_readers = 0
        self._timeout: asyncio.TimerHandle | None = None

    def start(
        self,
        events: AsyncGenerator[bodies.ResponseEvent, None],
        at_end: Sequence[Callable[[], object]],
    ) -> None:
        """
        Args:
            at_end: called when it is over.
        """

        def end(_task: object) -> None:
            for call in at_end:
                call()

        self._task = asyncio.create_task(self._run(events))
        self._task.add_done_callback(end)
        self._count_readers(0)

    async def _run(self, events: AsyncGenerator[bodies.ResponseEvent, None]) -> None:
        try:
            async with contextlib.aclosing(events):
                async for each in events:
                    self._add(each)
        except asyncio.CancelledError:
            if self._is_cancelled:
                self.writer.cancel()
            else:
                self._add(self.writer.fail("server_error", "the server was stopped"))
        except Exception as error:
            self._add(failed_event(self.writer, error))
        finally:
            await self._keep(self.events if self.streams else None)
            self.is_over = True
            self._more.set()
            self._count_readers(0)

    def _add(self, each: bodies.ResponseEvent) -> None:
        if self.streams:
            self.events.append(event(each, each.type))
            self._more.set()
            self._more = asyncio.Event()

    async def follow(self, number: int = 0) -> AsyncGenerator[bytes, None]:
        """Its events from that with a number on, until it is over."""
        self._count_readers(1)
        try:
            while True:
                more = self._more
                while number < len(self.events):
                    yield self.events[number]
                    number += 1
                if self.is_over:
                    return
                await more.wait()
        finally:
            self._count_readers(-1)

    def _count_readers(self, more: int) -> None:
        """The time without any begins, or ends."""
        self._num_readers += more
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        if self._unread_timeout_s is not None and not self._num_readers and not self.is_over:
            loop = asyncio.get_running_loop()
            self._timeout = loop.call_later(self._unread_timeout_s, self._cancel)

    def _cancel(self, *, by_caller: bool = True) -> None:
        self._is_cancelled = by_caller
        if self._task is not None:
            self._task.cancel()

    async def cancel(self, *, by_caller: bool = True) -> None:
        """It is over when this returns."""
        self._cancel(by_caller=by_caller)
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)


class BackgroundRuns:
    """All that are not over, by the ids of their responses."""

    def __init__(self) -> None:
        self._runs: dict[str, BackgroundRun] = {}

    def check(self, owner: str | None, most: int | None) -> None:
        """
        Args:
            most: of this owner.

        Raises:
            ApiError: there are as many as may be.
        """
        num_own = sum(run.owner == owner for run in self._runs.values())
        if len(self._runs) >= _MOST_RUNS or num_own >= (most or _MOST_RUNS):
            what = f"{num_own} responses run in the background; wait for their end"
            raise ApiError(429, what, code="queue_full", retry_after_s=1)

    def start(
        self,
        run: BackgroundRun,
        events: AsyncGenerator[bodies.ResponseEvent, None],
        exchange: Exchange,
    ) -> None:
        """What its exchange holds, such as a model that would end otherwise, it holds now."""
        response_id = run.writer.response.id
        self._runs[response_id] = run
        held, exchange.at_end = exchange.at_end, []
        run.start(events, [lambda: self._runs.pop(response_id), *held])

    def get(self, response_id: str, owner: str | None) -> BackgroundRun | None:
        """None: it is over, or belongs to another one."""
        run = self._runs.get(response_id)
        return None if run is None or run.owner != owner else run

    async def close(self) -> None:
        """All of them fail."""
        for run in list(self._runs.values()):
            await run.cancel(by_caller=False)


def failed_event(writer: ResponseWriter, error: Exception) -> bodies.ResponseEvent:
    """The last event of a response that fails."""
    told = api_error(error)
    if told is None:
        logger.error("a response failed", exc_info=error)
        told = ApiError(500, f"the server failed: {type(error).__name__}")
    code = "invalid_prompt" if told.status < 500 else "server_error"
    code = "rate_limit_exceeded" if told.status == 429 else code
    return writer.fail(told.code if told.code == "context_length_exceeded" else code, told.message)
