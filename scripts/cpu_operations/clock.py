"""Times calls of several backends in turns, so that a ratio is one of the same minute."""

import time
from collections.abc import Callable, Sequence

import torch


def clock() -> float:
    """Seconds: of this thread's work where it is the only one, else of the wall."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def time_in_turns(
    cases: Sequence[Callable[[], object]], rounds: int, seconds: float
) -> list[float]:
    """Best seconds a call of each; each round runs every case for about `seconds`."""
    best = [float("inf")] * len(cases)
    for case in cases:
        case()
    for _ in range(rounds):
        for index, case in enumerate(cases):
            begun, calls = clock(), 0
            while (spent := clock() - begun) < seconds:
                case()
                calls += 1
            best[index] = min(best[index], spent / calls)
    return best
