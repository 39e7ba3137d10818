"""A picture of a run, by matplotlib: tokens of steps, blocks in use, queues, latencies."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from scripts.simulator import SimulationError
from scripts.simulator.metrics import LATENCIES, RequestMetrics

FIELDS = ("prefill tokens", "decode tokens", "blocks in use", "running", "waiting", "engines busy")
_NUM_BUCKETS = 2048
_FIRST_WIDTH_S = 1e-3
_MAX_POINTS = 2000


class Timeline:
    """Time integrals over all engines, in a bounded number of buckets: when time runs out of them,
    pairs are merged and they are twice as wide."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._values = np.zeros((len(FIELDS), _NUM_BUCKETS))

    def add(self, start_s: float, duration_s: float, values: tuple[float, ...]) -> None:
        """A step with these values, in the order of FIELDS, spread evenly over its duration."""
        if duration_s <= 0:
            return
        stop_s = start_s + duration_s
        while stop_s >= self._width_s * _NUM_BUCKETS:
            merged = self._values[:, ::2] + self._values[:, 1::2]
            self._values = np.concatenate([merged, np.zeros_like(merged)], axis=1)
            self._width_s *= 2
        first, last = int(start_s / self._width_s), int(stop_s / self._width_s)
        edges = np.arange(first, last + 2) * self._width_s
        edges[0], edges[-1] = start_s, stop_s
        self._values[:, first : last + 1] += np.outer(values, np.diff(edges))

    def series(self) -> tuple[npt.NDArray[np.float64], dict[str, npt.NDArray[np.float64]]]:
        """The middles of the buckets in seconds, and each field's mean in them."""
        used = np.flatnonzero(self._values[-1])
        stop = int(used[-1]) + 1 if len(used) else 0
        times = (np.arange(stop, dtype=np.float64) + 0.5) * self._width_s
        return times, dict(zip(FIELDS, self._values[:, :stop] / self._width_s, strict=True))


def draw(path: Path, metrics: RequestMetrics, timeline: Timeline) -> None:
    """A PNG file; the same run, the same bytes."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SimulationError(
            "--picture needs matplotlib, which is not installed; pip install "
            "'engine-core[simulate]' or leave --picture out"
        ) from None
    times, means = timeline.series()
    figure = Figure(figsize=(10, 12), layout="constrained")
    steps, blocks, queues, latencies = figure.subplots(4)
    busy = np.maximum(means["engines busy"], 1e-12)
    tokens = {name: means[name] / busy for name in ("decode tokens", "prefill tokens")}
    steps.stackplot(times, *tokens.values(), labels=list(tokens))
    blocks.plot(times, means["blocks in use"], label="in use")
    for name in ("running", "waiting"):
        queues.plot(times, means[name], label=name)
    titles = ("tokens in a step", "blocks, all engines", "requests")
    for axes, title in zip((steps, blocks, queues), titles, strict=True):
        axes.set(xlabel="virtual time, s", ylabel=title, ylim=(0, None))
    for name, title in LATENCIES.items():
        values = metrics.latencies(name)
        if len(values):
            picked = np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int)
            shares = (picked + 1) / len(values)
            latencies.plot(np.maximum(values[picked], 1e-6), shares, label=title)
    latencies.set(xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1))
    for axes in (steps, blocks, queues, latencies):
        axes.legend(loc="upper right")
    try:
        figure.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise SimulationError(f"cannot write {path}: {error.strerror}") from None
