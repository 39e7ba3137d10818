"""A clock, a timer and work for the frame of the GPU suite. Not a test."""

from scripts.gpu.frame import Ceilings, Work, run_timings

CEILINGS = Ceilings(copy_bytes_s=4e12, matmul_flop_s=8e14)


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def takes(self, seconds, result):
        def run():
            self.now_s += seconds
            return result

        return run


class FakeTimer:
    def __init__(self, median_us=2.0):
        self.median_us, self.calls = median_us, 0

    def measure(self, call, *, in_graph):
        self.calls += 1
        call()
        graph_us = 1.0 if in_graph else None
        return {"median_us": self.median_us, "again_us": self.median_us, "graph_us": graph_us}


def fails():
    raise ValueError("shape is wrong;\n give another")


def timed(*timings, states, timer=None, clock=None, deadline_s=100.0):
    rows = []
    run_timings(
        timings,
        states=states,
        ceilings=CEILINGS,
        timer=timer or FakeTimer(),
        clock=clock or Clock(),
        deadline_s=deadline_s,
        emit=rows.append,
    )
    return rows


def work(**changes):
    return Work(**({"call": lambda: None, "num_bytes": 4e6} | changes))
