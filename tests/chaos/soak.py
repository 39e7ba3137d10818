"""`make soak`: a steady mixed load for a long time, with clients that join and leave, abort and
read slowly. Memory, descriptors and threads must not grow after warm-up; a picture of it all."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import App, Parameter

from tests.chaos.options import Options
from tests.chaos.processes import MARK, Daemon, count_descriptors, marked_processes
from tests.chaos.stage import ClientSlot, Stage, conclude
from tests.chaos.tally import Tally, percentiles

_WARM_UP_SHARE = 0.25
_MAX_SAMPLES = 600
_NUM_WINDOWS = 40
_MAX_GROWTH_BYTES = 8 * 1024**2
_MAX_GROWTH_SHARE = 0.02
"""Memory may grow by the larger of both; descriptors and threads by less than one."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SoakOptions(Options):
    time_s: Annotated[float, Parameter(name="--time", help="A quarter is warm-up.")] = 3600.0
    num_processes: Annotated[int, Parameter(name="--processes")] = 4
    num_blocks: int = 1024
    requests_per_client: Annotated[int, Parameter(help="Then it leaves, another joins.")] = 25


_DEFAULT = SoakOptions()
app = App(name="soak", help=__doc__, result_action="return_value")


@dataclasses.dataclass(frozen=True)
class Sample:
    """Of one process at one moment of the run."""

    process: str
    at_s: float
    memory_bytes: int
    num_descriptors: int
    num_threads: int


class Soak(Stage):
    def __init__(self, folder: Path, options: Options, *, restart_every_s: float) -> None:
        super().__init__(folder, options)
        self.samples: list[Sample] = []
        self.began_s = 0.0
        self._restart_every_s = restart_every_s
        self._num_restarts = 0

    async def _is_ready(self, daemon: Daemon, num_ready: int) -> bool:
        """And has the pages of its KV cache, which a thread takes behind the start."""
        if not await super()._is_ready(daemon, num_ready):
            return False
        while daemon.is_alive and "cache-pages" in _thread_names(daemon.process.pid):
            await asyncio.sleep(0.1)
        return daemon.is_alive

    async def _main(self, daemon: Daemon) -> None:
        for slot in self._slots:
            self._start_client(slot)
        for slot in self._slots:
            await self._has_warmed_up(slot)
        self._start_time()
        self.began_s = time.monotonic()
        interval_s = max(self._options.time_s / _MAX_SAMPLES, 0.25)
        restart_s = time.monotonic() + self._restart_every_s
        while not await self._is_over_after(interval_s):
            self._take_samples(daemon)
            if self._restart_every_s and time.monotonic() >= restart_s:
                restart_s += self._restart_every_s
                self._num_restarts += 1
                await self._kill_daemon(daemon)
                daemon = self._daemon = self._start_daemon(is_supervised=False)
                await self._is_ready(daemon, 1)

    async def _has_warmed_up(self, slot: ClientSlot) -> None:
        """Its clients have joined and left once, or tried to."""
        assert slot.process is not None and slot.log is not None
        wanted = (self._options.requests_per_client or 1) * self._options.clients_per_process
        while slot.process.poll() is None:
            if slot.log.exists() and slot.log.read_text().count('"event": "end"') > wanted:
                return
            await asyncio.sleep(0.1)

    def _take_samples(self, daemon: Daemon) -> None:
        suffix = f" after {self._num_restarts} restarts" if self._num_restarts else ""
        processes = {f"daemon{suffix}": daemon.process}
        processes |= {slot.name: slot.process for slot in self._slots if slot.process is not None}
        for name, process in processes.items():
            if process.poll() is None:
                self.samples.append(_sample(name, process.pid, time.monotonic() - self.began_s))


def _sample(name: str, pid: int, at_s: float) -> Sample:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    memory_bytes = int(fields["VmRSS"].split()[0]) * 1024
    return Sample(name, at_s, memory_bytes, count_descriptors(pid), int(fields["Threads"]))


def _thread_names(pid: int) -> set[str]:
    names = set()
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            names.add(path.read_text().strip())
    return names


def slope(times_s: Any, values: Any) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen), per second.

    Source: P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, 1968.
    """
    times_s, values = np.asarray(times_s, float), np.asarray(values, float)
    first, second = np.triu_indices(len(times_s), 1)
    if not len(first):
        return 0.0
    return float(np.median((values[second] - values[first]) / (times_s[second] - times_s[first])))


def growth(samples: list[Sample], time_s: float) -> list[dict[str, Any]]:
    """For each process and quantity: the growth after warm-up by its slope, and the bound. What
    grows does so in both halves of that time, by twice the lesser: a buffer that is made late is
    there once. A process that was sampled for less than half of that time is left out."""
    start_s = _WARM_UP_SHARE * time_s
    rows = []
    for process in dict.fromkeys(sample.process for sample in samples):
        mine = [s for s in samples if s.process == process and s.at_s >= start_s]
        if len(mine) < 3 or mine[-1].at_s - mine[0].at_s < (time_s - start_s) / 2:
            continue
        times_s = [sample.at_s for sample in mine]
        for quantity in ("memory_bytes", "num_descriptors", "num_threads"):
            values = [getattr(sample, quantity) for sample in mine]
            median = float(np.median(values))
            half = len(mine) // 2
            halves = (slice(None, half + 1), slice(half, None))
            slopes = [slope(times_s[part], values[part]) for part in halves]
            grown = min(slopes) * (times_s[-1] - times_s[0])
            bound = 1.0
            if quantity == "memory_bytes":
                bound = max(_MAX_GROWTH_BYTES, _MAX_GROWTH_SHARE * median)
            rows.append(
                {
                    "process": process,
                    "quantity": quantity,
                    "median": median,
                    "growth": round(grown, 3),
                    "seconds": round(times_s[-1] - times_s[0], 1),
                    "bound": bound,
                    "is_bounded": grown < bound,
                }
            )
    return rows


def latencies(logs: list[tuple[Path, float | None]], began_s: float) -> list[dict[str, float]]:
    """Of each request that ended in the run and has tokens: when, its time to the first and per
    token."""
    ends = []
    for path, _ in logs:
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if (
                entry.get("per_token_s")
                and entry["at_s"] >= began_s
                and entry["use"] not in ("slow", "busy")
            ):
                ends.append(
                    {
                        "at_s": entry["at_s"] - began_s,
                        "first_token_s": entry["first_token_s"],
                        "per_token_s": entry["per_token_s"],
                    }
                )
    return sorted(ends, key=lambda end: end["at_s"])


def draw(path: Path, samples: list[Sample], ends: list[dict[str, float]], time_s: float) -> None:
    """Four panels over time: memory, descriptors and threads, and the two latencies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7), sharex=True, layout="constrained")
    memory, counts, first, per_token = axes.flat
    for process in dict.fromkeys(sample.process for sample in samples):
        mine = [sample for sample in samples if sample.process == process]
        minutes = [sample.at_s / 60 for sample in mine]
        is_daemon = process.startswith("daemon")
        style = {"color": "black", "lw": 2} if is_daemon else {"lw": 0.8, "alpha": 0.6}
        label = process if is_daemon else None
        memory.plot(minutes, [s.memory_bytes / 2**20 for s in mine], label=label, **style)
        counts.plot(minutes, [s.num_descriptors for s in mine], label=label, **style)
        counts.plot(minutes, [s.num_threads for s in mine], ls=":", **style)
    memory.set_ylabel("resident memory, MiB")
    memory.legend()
    counts.set_ylabel("descriptors (lines), threads (dots)")
    for axis, name, title in (
        (first, "first_token_s", "time to first token, s"),
        (per_token, "per_token_s", "time per output token, s"),
    ):
        edges = np.linspace(0, time_s, _NUM_WINDOWS + 1)
        windows = [
            [end[name] for end in ends if start <= end["at_s"] < stop]
            for start, stop in itertools.pairwise(edges)
        ]
        for share in (50, 90, 99):
            values = [np.percentile(window, share) if window else np.nan for window in windows]
            axis.plot((edges[:-1] + edges[1:]) / 120, values, label=f"p{share}")
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.legend()
    for axis in axes.flat:
        axis.axvline(_WARM_UP_SHARE * time_s / 60, color="grey", lw=0.5)
    for axis in axes[1]:
        axis.set_xlabel("minutes; the grey line ends the warm-up")
    figure.savefig(path)
    pyplot.close(figure)


@app.default
def main(
    *,
    options: SoakOptions = _DEFAULT,
    restart_every: Annotated[
        float, Parameter(help="Seconds between kills of the daemon; 0: never.")
    ] = 0.0,
    picture: Annotated[Path | None, Parameter(help="An .svg or .png file.")] = None,
) -> int:
    mark = os.environ.setdefault(MARK, secrets.token_hex(8))
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        soak = Soak(Path(name), options, restart_every_s=restart_every)
        asyncio.run(soak.run())
        tally = Tally(soak.logs, [])
        ends = latencies(soak.logs, soak.began_s)
    rows = growth(soak.samples, options.time_s)
    failures = soak.failures(tally, marked_processes(mark))
    failures += [f"it grows: {row}" for row in rows if not row["is_bounded"]]
    if not rows:
        failures.append("nothing was measured")
    if picture is not None:
        draw(picture, soak.samples, ends, options.time_s)
    later = [end for end in ends if end["at_s"] >= _WARM_UP_SHARE * options.time_s]
    for row in rows:
        print("{process} {quantity}: {growth:+.1f} over {seconds} s of {median:.0f}".format(**row))
    document = {
        name: percentiles([end[name] for end in later]) for name in ("first_token_s", "per_token_s")
    }
    document |= {"growth": rows, "left_in_the_engine": soak.left, "problems": soak.problems}
    return conclude(options, document, tally, failures)


if __name__ == "__main__":
    sys.exit(app())
