"""Counts what work costs without a clock, so that it holds on any machine."""

import gc
import sys
from collections.abc import Callable


def lines_run(work: Callable[[], object]) -> int:
    """Lines executed in Python code while `work` runs, each turn of a loop counted."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # others' callbacks run Python lines of their own
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return count
