"""The client's event loop (uvloop where it exists), its thread for the synchronous API, and its
clock."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")

_PIECE_S = 0.01


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop; the standard one where uvloop does not exist (Windows)."""
    if sys.platform == "win32":
        return asyncio.SelectorEventLoop()
    import uvloop

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the client's own kind of loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock:
    """Real time. A subclass with virtual time overrides `now` and `call_later`."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call `callback` on the running event loop after the delay."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        woken = asyncio.Event()
        timer = self.call_later(delay_s, woken.set)
        try:
            await woken.wait()
        finally:
            timer.cancel()


class Pause:
    """Of a task with many pieces of work, so that others run between them."""

    def __init__(self) -> None:
        self._since_s = time.perf_counter()

    async def between(self) -> None:
        """Let others run, if that was long ago."""
        if time.perf_counter() - self._since_s > _PIECE_S:
            await asyncio.sleep(0)
            self._since_s = time.perf_counter()


class LoopThread:
    """An event loop in a thread of its own, for callers that block."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._stop = asyncio.Event()
        # A daemon thread: an exit handler stops it, and the interpreter joins other threads
        # before it runs exit handlers.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stop.wait())

    def run_and_wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on the loop and return its result. An interrupt cancels it, waits for its
        clean-up, and is raised. Raises RuntimeError: the thread was closed."""
        if self._loop.is_closed():
            coroutine.close()
            raise RuntimeError("the event loop's thread has ended")
        call = _Call(coroutine)
        self._loop.call_soon_threadsafe(call.start, self._loop)
        try:
            call.ended.acquire()
        except BaseException:
            self._loop.call_soon_threadsafe(call.cancel)
            call.ended.acquire(timeout=5)
            raise
        return call.result()

    def close(self) -> None:
        """Stop the loop and wait for its thread. Calling it again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class _Call(Generic[T]):
    """A coroutine that another thread waits for. `asyncio.run_coroutine_threadsafe` passes its
    result through two futures, which takes longer than all else of a short call."""

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[None] | None = None
        self._values: list[T] = []
        self._error: BaseException | None = None
        self.ended = threading.Lock()
        """Held until it has ended."""
        self.ended.acquire()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._run())

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def result(self) -> T:
        """The call's value. Raises the call's exception, if it ended with one."""
        if self._error is None:
            return self._values[0]
        try:
            if isinstance(self._error, asyncio.CancelledError):
                raise CancelledError from self._error
            raise self._error
        finally:
            self._error = None  # whose traceback holds this object

    async def _run(self) -> None:
        try:
            self._values.append(await self._coroutine)
        except BaseException as error:
            self._error = error
        finally:
            self.ended.release()
