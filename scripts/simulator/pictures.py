"""Pictures of a run, by matplotlib: tokens of steps, blocks in use, queues, latencies."""

from pathlib import Path
from typing import Any

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


def draw(folder: Path, metrics: RequestMetrics, timeline: Timeline) -> list[Path]:
    """Four PNG files; the same run, the same bytes.

    Raises:
        SimulationError: no matplotlib, or a folder that cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SimulationError(
            "--pictures needs matplotlib, which is not installed; pip install "
            "'engine-core[simulate]' or leave --pictures out"
        ) from None
    times, means = timeline.series()
    busy = np.maximum(means["engines busy"], 1e-12)
    series: dict[str, tuple[str, dict[str, Any]]] = {
        "batch-composition": (
            "tokens in a step",
            {name: means[name] / busy for name in ("decode tokens", "prefill tokens")},
        ),
        "blocks-in-use": ("blocks, all engines", {"in use": means["blocks in use"]}),
        "queues": ("requests", {name: means[name] for name in ("running", "waiting")}),
    }
    figures = {name: Figure(figsize=(9, 4), layout="constrained") for name in series}
    for name, (label, lines) in series.items():
        axes = figures[name].subplots()
        if name == "batch-composition":
            axes.stackplot(times, *lines.values(), labels=list(lines))
        else:
            for title, values in lines.items():
                axes.plot(times, values, label=title, linewidth=1)
        axes.set(xlabel="virtual time, s", ylabel=label, ylim=(0, None))
        axes.legend(loc="upper right")
    figures["latency-cdfs"] = figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, title in LATENCIES.items():
        values = metrics.latencies(name)
        if len(values):
            picked = np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int)
            shares = (picked + 1) / len(values)
            axes.plot(np.maximum(values[picked], 1e-6), shares, label=title, linewidth=1)
    axes.set(xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1))
    axes.legend(loc="lower right")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png", metadata={"Software": None})
    except OSError as error:
        raise SimulationError(f"cannot write pictures to {folder}: {error.strerror}") from None
    return [folder / f"{name}.png" for name in figures]
