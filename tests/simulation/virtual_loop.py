"""An asyncio event loop in virtual time, whose descriptors are simulated sockets."""

import asyncio
import selectors
from collections.abc import Callable
from typing import Any

MAX_PASSES_WITHOUT_TIME = 20_000
"""More passes of the loop at one moment are a loop that never ends."""


class Livelock(BaseException):
    """The event loop runs and time stands still."""


class Deadlock(BaseException):
    """Nothing is ready and no timer is set."""


class _Selector(selectors.BaseSelector):
    """Waiting is a jump of the clock; nothing is polled."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(
            fileobj, fileobj if isinstance(fileobj, int) else -1, events, data
        )
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Any:
        return self._keys

    def close(self) -> None:
        self._keys.clear()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.pass_time(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is ready to run.

    Readers are called while `is_readable(fd)` says so, in the order in which they were added.
    """

    def __init__(self, is_readable: Callable[[int], bool]) -> None:
        self._now_s = 0.0
        self._num_passes = 0
        self._is_readable = is_readable
        self._callbacks: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._now_s

    def pass_time(self, timeout: float | None) -> None:
        ready = [fd for fd in self._callbacks if self._is_readable(fd)]
        for fd in ready:
            callback, args = self._callbacks[fd]
            self.call_soon(self._call_reader, fd, callback, args)
        if ready or timeout == 0:
            self._num_passes += 1
            if self._num_passes > MAX_PASSES_WITHOUT_TIME:
                raise Livelock(
                    f"{self._num_passes} passes of the event loop at {self._now_s:.3f} s"
                )
            return
        if timeout is None:
            raise Deadlock(f"nothing is left to happen at {self._now_s:.3f} s")
        if timeout > 0:
            self._num_passes = 0
            # asyncio runs what is due within its clock's resolution
            self._now_s += timeout

    def _call_reader(self, fd: int, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        if self._callbacks.get(fd) == (callback, args):
            callback(*args)

    def add_reader(self, fd: Any, callback: Callable[..., object], *args: Any) -> None:
        self._callbacks[int(fd)] = (callback, args)

    def remove_reader(self, fd: Any) -> bool:
        return self._callbacks.pop(int(fd), None) is not None
