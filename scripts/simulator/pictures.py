"""Pictures of a run: what steps held, blocks in use, queues, latencies. Needs matplotlib (the extra
`simulate`), which is imported only here and only when asked for.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.simulator.errors import SimulationError
from scripts.simulator.request_metrics import RequestMetrics
from scripts.simulator.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "longest_gap": "longest gap",
    "end_to_end": "end to end",
}
_MAX_POINTS = 2000


def draw(folder: Path, metrics: RequestMetrics, timeline: Timeline) -> list[Path]:
    """Four PNG files; the same run, the same bytes.

    Raises:
        SimulationError: no matplotlib, or a folder that cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SimulationError(
            "--pictures needs matplotlib, which is not installed; pip install "
            "'engine-core[simulate]' or leave --pictures out"
        ) from None
    times, means = timeline.series()
    # sums over engines; a busy engine's step is what one wants to see
    busy = np.maximum(means["engines busy"], 1e-12)
    pictures: dict[str, Any] = {
        "batch-composition": (
            "tokens in a step",
            {name: means[name] / busy for name in ("decode tokens", "prefill tokens")},
        ),
        "blocks-in-use": ("blocks, all engines", {"in use": means["blocks in use"]}),
        "queues": ("requests", {name: means[name] for name in ("running", "waiting")}),
    }
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (label, series) in pictures.items():
            figure = Figure(figsize=(9, 4), layout="constrained")
            axes = figure.subplots()
            if name == "batch-composition":
                axes.stackplot(times, *series.values(), labels=list(series))
            else:
                for title, values in series.items():
                    axes.plot(times, values, label=title, linewidth=1)
            axes.set(xlabel="virtual time, s", ylabel=label, ylim=(0, None))
            axes.legend(loc="upper right")
            written.append(_save(FigureCanvasAgg, figure, folder / f"{name}.png"))
        written.append(
            _save(FigureCanvasAgg, _latencies(Figure, metrics), folder / "latency-cdfs.png")
        )
    except OSError as error:
        raise SimulationError(f"cannot write pictures to {folder}: {error.strerror}") from None
    return written


def _latencies(figure_type: type["Figure"], metrics: RequestMetrics) -> "Figure":
    figure = figure_type(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for name, title in _LATENCIES.items():
        values = metrics.latencies(name)
        if len(values):
            places = np.linspace(0, len(values) - 1, min(len(values), _MAX_POINTS)).astype(int)
            shares = (places + 1) / len(values)
            axes.plot(np.maximum(values[places], 1e-6), shares, label=title, linewidth=1)
    axes.set(xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1))
    axes.legend(loc="lower right")
    return figure


def _save(canvas_type: Any, figure: "Figure", path: Path) -> Path:
    canvas_type(figure).print_png(path, metadata={"Software": None})
    return path
