"""A process that times one family: `python -m scripts.gpu.worker INSTRUCTION`. A kernel that reads
outside its memory ends its process's use of the GPU, and one that never ends must be killed:
neither may stop the other families."""

import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from scripts.gpu.clocks import watched_clocks
from scripts.gpu.timing import Ceilings, Instruction, emit, load_family, run_group

_FLUSH_BYTES = 2 << 30
"""Far more than an L2: reading it takes half a millisecond, in which the host launches a call of
many kernels whole."""
_WARM_UP_CALLS = 5
_MOST_REPEATS = 100
_FEWEST_REPEATS = 10
_REPEATS_US = 200_000.0
_CALLS_A_GRAPH = 10
_GRAPH_REPLAYS = 20
_COPY_BYTES = 4 << 30
_MATMUL_SIZE = 8192


class CudaTimer:
    """Medians of event times on the current device.

    A cold figure: before each call the L2 cache is filled with something else by *reading* a large
    buffer (dirty lines would be written back while the kernel runs), then one call runs between two
    events. The flush takes longer than the host takes for the call, so that all of its launches are
    queued before the first one begins: what is timed is the device, not Python. A call that waits
    for the device, such as a whole step, is timed with its host.

    A graph figure: several calls captured in one CUDA graph and replayed, with a warm cache; it has
    no launch cost, and proves that the call can be captured."""

    @functools.cached_property
    def _flush(self) -> torch.Tensor:
        """Takes memory only when something is timed."""
        return torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def measure(self, call: Callable[[], object], *, in_graph: bool = True) -> dict[str, Any]:
        """For `timing.run_group`. `again_us`: once more; what is smaller than the difference
        of the two is noise."""
        for _ in range(_WARM_UP_CALLS):
            call()
        torch.cuda.synchronize()
        estimate_us = statistics.median(self._cold(call, 5))
        repeats = int(min(max(_REPEATS_US / estimate_us, _FEWEST_REPEATS), _MOST_REPEATS))
        first, again = self._cold(call, repeats), self._cold(call, repeats)
        return {
            "median_us": round(statistics.median(first), 2),
            "again_us": round(statistics.median(again), 2),
            "fastest_us": round(min(first + again), 2),
            "repeats": repeats,
            "graph_us": self._graph(call) if in_graph else None,
        }

    def _cold(self, call: Callable[[], object], repeats: int) -> list[float]:
        starts, stops = _events(repeats), _events(repeats)
        torch.cuda.synchronize()
        for start, stop in zip(starts, stops, strict=True):
            self._flush.sum()
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]

    def _graph(self, call: Callable[[], object]) -> float | str:
        """Microseconds a call, or why it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(_CALLS_A_GRAPH):
                    call()
        except Exception as error:
            torch.cuda.synchronize()
            return f"not captured: {' '.join(str(error).split())[:200]}"
        times: list[float] = []
        for _ in range(_GRAPH_REPLAYS):
            start, stop = _events(2)
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(1e3 * start.elapsed_time(stop) / _CALLS_A_GRAPH)
        return round(statistics.median(times), 2)


def measure_ceilings(timer: CudaTimer) -> Ceilings:
    """A large copy on the device, counting bytes read and written; a large bf16 product, on random
    numbers (zeros run faster than real data)."""
    src = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)
    copy_us = timer.measure(lambda: dst.copy_(src), in_graph=False)["median_us"]
    size = (_MATMUL_SIZE, _MATMUL_SIZE)
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul_us = timer.measure(lambda: torch.mm(a, b, out=out), in_graph=False)["median_us"]
    return Ceilings(
        copy_bytes_s=2 * _COPY_BYTES / copy_us * 1e6,
        matmul_flop_s=2 * _MATMUL_SIZE**3 / matmul_us * 1e6,
    )


def _events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def describe_device() -> dict[str, Any]:
    """The GPU, its driver, and what drives it here."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": getattr(properties, "L2_cache_size", None),
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None


def work(instruction: Instruction) -> None:
    """Emit a row for each result as it is known, with the clocks of its time."""
    deadline_s = time.monotonic() + instruction.seconds
    torch.manual_seed(instruction.seed)
    timer = CudaTimer()
    if instruction.ceilings is None:
        ceilings: dict[str, Any] = dataclasses.asdict(measure_ceilings(timer))
        emit({"device": describe_device(), "ceilings": ceilings})
        return
    with watched_clocks() as clocks:
        for group in load_family(instruction.family):
            if group.name in instruction.skip:
                continue
            run_group(
                group,
                only=instruction.only,
                ceilings=Ceilings(**instruction.ceilings),
                measure=timer.measure,
                clock=time.monotonic,
                deadline_s=deadline_s,
                emit=lambda row: emit(row | clocks()),
            )


if __name__ == "__main__":
    work(Instruction(**json.loads(sys.argv[1])))
