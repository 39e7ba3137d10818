"""A peer in a Python of its own, on the comparison's wire."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "comparison"))

from peers import TokenClock, serve, untimed


def prepare(options):
    fault = options.pop("fault", "")
    options.pop("threads")
    options.pop("model")
    print("a library may print what it likes")

    def generate(requests):
        if fault == "raise":
            raise RuntimeError("no kernel for this")
        if len(requests) > 1:
            return [untimed(number, 0.5) for number, _ in requests]
        clock = TokenClock(time.perf_counter())
        for _ in range(requests[0][0]):
            clock.note(1)
        return [clock.record()]

    return {"version": "1.2"}, generate


serve(prepare)
