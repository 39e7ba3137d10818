"""Times calls of several backends in alternation, so that a ratio is one of the same minute."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from cyclopts import Parameter

from kernels.cpu.library import THREADS_VARIABLE

Threads = Annotated[int | None, Parameter(help="Default: one a core.")]


def set_threads(threads: int | None) -> None:
    """Of torch and of the native library."""
    num_threads = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    os.environ[THREADS_VARIABLE] = str(num_threads)


def clock() -> float:
    """Seconds: of this thread's work where it is the only one, else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_times(cases: Sequence[Callable[[], object]], rounds: int, seconds: float) -> list[float]:
    """Best seconds a call of each; in each round every case runs for about `seconds`."""
    repeats = []
    for case in cases:
        case()
        start = clock()
        case()
        repeats.append(max(1, int(seconds / max(clock() - start, 1e-6))))
    best = [float("inf")] * len(cases)
    for _ in range(rounds):
        for index, case in enumerate(cases):
            start = clock()
            for _ in range(repeats[index]):
                case()
            best[index] = min(best[index], (clock() - start) / repeats[index])
    return best
