"""Worker processes that stay warm, and survive a compiler that aborts.

Owns the processes. Must not know what they do.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Runs functions of modules in processes; a context manager that ends them."""

    def __init__(self, num_processes: int) -> None:
        self._num_processes = num_processes
        self._pool = self._start(num_processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self,
        work: Callable[[Item], Result],
        items: Iterable[Item],
        died: Callable[[Item], Result],
    ) -> list[Result]:
        """`work` on every item, in their order; `died` is the result of one that ends a process."""
        items = list(items)
        results: dict[int, Result] = {}
        for index, future in enumerate([self._pool.submit(work, item) for item in items]):
            try:
                results[index] = future.result()
            except BrokenProcessPool:
                continue
        if len(results) < len(items):
            # one that dies takes the others along: each of them runs alone, so that it is known
            for index, item in enumerate(items):
                if index not in results:
                    results[index] = self._run_alone(work, item, died)
            self._pool = self._start(self._num_processes)
        return [results[index] for index in range(len(items))]

    def _run_alone(
        self, work: Callable[[Item], Result], item: Item, died: Callable[[Item], Result]
    ) -> Result:
        with self._start(1) as pool:
            try:
                return pool.submit(work, item).result()
            except BrokenProcessPool:
                return died(item)

    @staticmethod
    def _start(num_processes: int) -> ProcessPoolExecutor:
        # spawn: neither torch nor LLVM is safe to fork
        return ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn"))
