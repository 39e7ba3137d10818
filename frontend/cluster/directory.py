"""Which engines there are, and at which addresses: replicas report, HTTP replicas ask. One actor of
the deployment; after a restart it waits until all have reported again."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

REPORT_S = 1.0
"""Seconds between two reports of a replica."""
_FORGET_S = 10.0
"""Without a report a replica is taken for lost, with its node or its connection to it."""
_ANSWER_S = 10.0


class Snapshot(NamedTuple):
    version: tuple[float, int]
    """A number of this life of the directory, and one in it."""
    addresses: dict[str, list[str]]
    """Addresses of engines, by model."""


class EngineDirectory:
    """
    Args:
        keys: handed to all that ask, as the deployment's engines take only clients with them.
        is_restarted: the first answers wait until every replica had time to report.
    """

    def __init__(
        self,
        keys: dict[str, bytes],
        *,
        is_restarted: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._started_s = clock()
        self._complete_s = self._started_s + 3 * REPORT_S * is_restarted
        self._heard_s: dict[tuple[str, str], float] = {}
        self._num_changes = 0
        self._changed = asyncio.Event()

    async def keys(self) -> dict[str, bytes]:
        return self._keys

    async def report(self, model: str, address: str) -> None:
        """This engine serves."""
        is_new = (model, address) not in self._heard_s
        self._heard_s[model, address] = self._clock()
        if is_new:
            self._note_change()

    async def leave(self, model: str, address: str) -> None:
        """This engine ends, or is about to."""
        if self._heard_s.pop((model, address), None) is not None:
            self._note_change()

    async def changes(self, version: tuple[float, int] | None = None) -> Snapshot:
        """What there is, as soon as it is another version; else after some seconds."""
        deadline_s = self._clock() + _ANSWER_S
        while True:
            self._forget_silent()
            now_s = self._clock()
            is_news = self._version != version and now_s >= self._complete_s
            if is_news or now_s >= deadline_s:
                break
            self._changed.clear()
            try:
                async with asyncio.timeout(REPORT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
        addresses: dict[str, list[str]] = {}
        for model, address in self._heard_s:
            addresses.setdefault(model, []).append(address)
        return Snapshot(self._version, addresses)

    @property
    def _version(self) -> tuple[float, int]:
        return self._started_s, self._num_changes

    def _forget_silent(self) -> None:
        now_s = self._clock()
        for each, heard_s in list(self._heard_s.items()):
            if now_s - heard_s > _FORGET_S:
                del self._heard_s[each]
                self._note_change()

    def _note_change(self) -> None:
        self._num_changes += 1
        self._changed.set()
