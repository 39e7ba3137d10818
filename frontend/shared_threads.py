"""Threads for what is done of a request before it is sent: owners of requests take them in turn, so
that nobody waits for all that another one sent."""

import asyncio
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, TypeVar

from frontend.errors import QueueFull
from protocol.errors import ErrorCode

T = TypeVar("T")

current_owner: ContextVar[str | None] = ContextVar("current_owner", default=None)
"""Whose request is being answered: the name of a key, or an address. None: this program's own."""


class SharedThreads:
    """Each owner has one call after another's, at most all threads but one, and a limit of waiting
    calls. Alone, this program's own calls take all threads and have no limit.

    Args:
        work: what the calls do, for errors: "chat templates".
    """

    def __init__(self, work: str, num_threads: int, max_waiting: int) -> None:
        self._work = work
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._reset()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset)  # it has none of the threads

    def _reset(self) -> None:
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix=self._work)
        self._lock = threading.Lock()
        self._num_running: Counter[str | None] = Counter()
        self._waiting: dict[str | None, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """Calls that wait, by owner; the next one's turn is first."""

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` returns, in a thread. Whoever stops waiting before its turn takes none.
        Raises QueueFull: so many calls of the current owner wait."""
        owner = current_owner.get()
        future: Future[T] = Future()
        with self._lock:
            waiting = self._waiting.setdefault(owner, deque())
            if owner is not None and len(waiting) >= self._max_waiting:
                raise QueueFull(
                    f"{len(waiting)} requests of {owner!r} wait for {self._work}, the limit is "
                    f"{self._max_waiting}; send it again when one has ended",
                    request_id="",
                    code=ErrorCode.QUEUE_FULL,
                )
            waiting.append((future, call))
            self._begin()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            with self._lock:
                waiting = self._waiting.get(owner, deque())
                if (future, call) in waiting:
                    waiting.remove((future, call))
            raise

    def _begin(self) -> None:
        """Calls whose turn it is, under the lock."""
        while sum(self._num_running.values()) < self._num_threads:
            able = [owner for owner in self._waiting if self._may_begin(owner)]
            if not able:
                return
            owner = able[0]
            waiting = self._waiting.pop(owner)
            if waiting:
                self._num_running[owner] += 1
                future, call = waiting.popleft()
                self._threads.submit(self._call, owner, future, call)
            if waiting:
                self._waiting[owner] = waiting

    def _may_begin(self, owner: str | None) -> bool:
        most = self._num_threads - (owner is not None)
        return self._num_running[owner] < max(1, most)

    def _call(self, owner: str | None, future: Future[T], call: Callable[[], T]) -> None:
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        finally:
            with self._lock:
                self._num_running[owner] -= 1
                self._num_running += Counter()  # without those that have none
                self._begin()


OWN_TEMPLATES = SharedThreads("the model's chat template and tokenizer", 3, 4096)
REQUEST_TEMPLATES = SharedThreads("chat templates that requests bring", 2, 64)
TEXTS = SharedThreads("texts to be read", 2, 4096)
LARGE_TEXTS = SharedThreads("large texts to be read", 2, 256)
"""Reading a text takes up to 165 times its memory: few are read at once."""
LARGE_ANSWERS = SharedThreads("large answers to be made", 2, 4096)
NUM_MEDIA_THREADS = min(4, os.cpu_count() or 1)
"""So few that the memory of what is decoded at once has a bound."""
MEDIA = SharedThreads("images and sounds to be decoded", NUM_MEDIA_THREADS, 256)
