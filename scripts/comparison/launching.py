"""What all engines have in common when they are started and asked.

Owns the conditions that are the same for all, and an engine's answers in lines of JSON. Must not
know kinds of engines.
"""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scripts.comparison.descriptions import Description
from scripts.comparison.processes import ChildProcess, environment_for
from scripts.comparison.workloads import Workload
from scripts.load.records import RequestRecord

_POLL_S = 0.05


class SystemFailed(Exception):
    """The engine could not be started, or not do what it was asked. The text says what it said."""


class NotMeasured(Exception):
    """The engine is no candidate for this workload; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The same for all.

    Attributes:
        model: what engines are given that name no model of their own.
        client_processes: that send to engines which have an address.
        logs: the folder that gets what engines say.
    """

    model: str
    num_threads: int
    client_processes: int
    startup_timeout_s: float
    workload_timeout_s: float
    logs: Path


@dataclass(frozen=True, slots=True)
class Running:
    """An engine that takes requests.

    Attributes:
        run: one workload's records. Raises SystemFailed and NotMeasured.
        ready_s: from launch to ready; None for one that was up before.
        is_ours_to_end: it is a child of this process, so that its memory is known.
        facts: what it says of itself.
    """

    run: Callable[[Workload], list[RequestRecord]]
    ready_s: float | None
    is_ours_to_end: bool
    facts: dict[str, Any]


class System(Protocol):
    """One engine in one setting."""

    @property
    def name(self) -> str: ...

    @property
    def setting(self) -> str:
        """As on the command line."""

    def launch(self, conditions: Conditions) -> AbstractContextManager[Running]:
        """`Running` inside the block, gone after it.

        Raises:
            SystemFailed: it did not get ready.
        """


class Launched:
    """A process of an engine that was started just now, and the lines of JSON that it writes.

    Args:
        keep_lines: standard output is for `next_line`, else it goes where standard error goes.

    Raises:
        SystemFailed: there is no such program.
    """

    def __init__(
        self,
        description: Description,
        command: Sequence[str],
        conditions: Conditions,
        *,
        keep_lines: bool,
    ) -> None:
        self._started_s = time.perf_counter()
        self._startup_timeout_s = conditions.startup_timeout_s
        self._lines: queue.Queue[str] = queue.Queue()
        try:
            self.process = ChildProcess(
                command,
                environment=environment_for(conditions.num_threads, description.environment),
                log=conditions.logs / f"{description.name}.log",
                on_line=self._lines.put if keep_lines else None,
            )
        except OSError as error:
            raise SystemFailed(f"{command[0]} cannot be run: {error.strerror}") from error

    @property
    def since_launch_s(self) -> float:
        return time.perf_counter() - self._started_s

    def wait_for_ready_line(self) -> dict[str, Any]:
        """
        Raises:
            SystemFailed: the first line says something else, or there is none.
        """
        first = self.next_line(self._startup_timeout_s)
        if first.get("event") != "ready":
            raise SystemFailed(f"not ready: {first.get('reason', first)}")
        return first

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """
        Raises:
            SystemFailed: the process ended, or time did.
        """
        while not is_ready():
            if self.process.exit_code is not None:
                raise SystemFailed(f"the process {self.process.last_words()}")
            if self.since_launch_s > self._startup_timeout_s:
                raise SystemFailed(
                    f"not ready after {self._startup_timeout_s:g} s: {self.process.last_words()}"
                )
            time.sleep(_POLL_S)

    def next_line(self, timeout_s: float) -> dict[str, Any]:
        """
        Raises:
            SystemFailed: the process ended, or said nothing for so long, or no JSON.
        """
        deadline = time.perf_counter() + timeout_s
        while True:
            try:
                return dict(json.loads(self._lines.get(timeout=_POLL_S)))
            except queue.Empty:
                if self.process.exit_code is not None and self._lines.empty():
                    raise SystemFailed(f"the process {self.process.last_words()}") from None
                if time.perf_counter() > deadline:
                    raise SystemFailed(
                        f"no answer in {timeout_s:g} s: {self.process.last_words()}"
                    ) from None
            except (ValueError, TypeError) as error:
                raise SystemFailed(f"an answer that is no JSON: {error}") from error
