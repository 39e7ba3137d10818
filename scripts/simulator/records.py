"""Recorded runs of the daemon (`--trace FILE`) as the simulator needs them: settings, and rows to
fit a step model. Does not run anything.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.scheduler import SchedulerConfig
from engine_core.trace.reader import (
    TraceEvent,
    TraceFormatError,
    TraceHeader,
    TraceStep,
    read_header,
    read_trace,
)
from scripts.simulator.errors import SimulationError
from scripts.simulator.fitted import FittedModel
from scripts.simulator.step_work import FEATURES

_REQUIRED = {"num_blocks": int, "block_size": int, "scheduler": dict}


class RunRecord:
    """A record's settings, and its events, which are read anew each time.

    Raises:
        SimulationError: a file that cannot be read, is no record, or lacks a setting; also while
            events are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _Told(path):
            self._header: TraceHeader = read_header(path)
        missing = [
            name
            for name, kind in _REQUIRED.items()
            if not isinstance(self.settings.get(name), kind)
        ]
        if missing:
            raise SimulationError(
                f"{path}: its first line does not say {', '.join(missing)}; record the run again"
            )

    @property
    def settings(self) -> dict[str, Any]:
        return dict(self._header.config)

    @property
    def block_size(self) -> int:
        return int(self.settings["block_size"])

    @property
    def eos_token_ids(self) -> tuple[int, ...] | None:
        """None if the record does not say."""
        token_ids = self.settings.get("eos_token_ids")
        return None if token_ids is None else tuple(token_ids)

    def events(self) -> Iterator[TraceEvent]:
        with _Told(self.path):
            yield from read_trace(self.path)

    def scheduler_config(self) -> SchedulerConfig:
        """
        Raises:
            SimulationError: a setting that this scheduler does not have.
        """
        settings = self.settings["scheduler"]
        known = {field.name for field in dataclasses.fields(SchedulerConfig)}
        unknown = sorted(set(settings) - known)
        if unknown:
            raise SimulationError(
                f"{self.path}: the scheduler has no setting {', '.join(unknown)}; replay it "
                "with the version that made it"
            )
        return SchedulerConfig(**settings)

    def cache(self) -> KVCacheManager:
        settings = self.settings
        windows = settings.get("sliding_windows") or [None]
        return KVCacheManager(
            num_blocks=settings["num_blocks"],
            block_size=settings["block_size"],
            groups=[KVCacheGroupSpec(window) for window in windows],
            enable_prefix_caching=settings.get("enable_prefix_caching", True),
            watermark=settings.get("watermark", 0.01),
            num_host_blocks=settings.get("num_host_blocks", 0),
        )


def fit_record(path: Path) -> FittedModel:
    """A model of the record's step times.

    Raises:
        SimulationError: no record, or too few steps in it.
    """
    rows, durations_s = [], []
    for step, cycle_s in step_cycles(RunRecord(path).events()):
        if step.nums and cycle_s > 0:
            rows.append(features_of(step))
            durations_s.append(cycle_s)
    features = np.array(rows, np.float64).reshape(len(rows), len(FEATURES))
    return FittedModel.from_rows(features, np.array(durations_s))


def step_cycles(events: Iterator[TraceEvent]) -> Iterator[tuple[TraceStep, float]]:
    """Each step, and the seconds from its planning to that of the next: what a client sees of it
    includes the engine's own work between two steps. Where the engine had nothing to do in between,
    that work is what it was at the last step where it had. A step that was planned while another
    ran began when that one ended, and nothing lies between them."""
    last: TraceStep | None = None
    duration_s = between_s = end_s = 0.0
    for event in events:
        if not isinstance(event, TraceStep):
            continue
        if last is not None:
            if event.id == last.id + 1 and not set(last.sequences).isdisjoint(event.sequences):
                between_s = max(0.0, event.start_s - end_s)
            yield last, duration_s + between_s
        overlap_s = max(0.0, end_s - event.start_s)
        last, end_s = event, event.start_s + event.duration_s
        duration_s = event.duration_s - overlap_s
    if last is not None:
        yield last, duration_s + between_s


def features_of(step: TraceStep) -> tuple[float, ...]:
    """In the order of FEATURES."""
    scheduled = np.array(step.nums, np.int64)
    computed = np.array(step.context, np.int64)
    return (
        1.0,
        float(scheduled.sum()),
        float(len(scheduled)),
        float((computed + scheduled).sum()),
        float((scheduled * computed + scheduled * (scheduled + 1) // 2).sum()),
        float(step.copies[0] + step.copies[1]),
    )


class _Told:
    """Errors of reading, as those of the simulator."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TraceFormatError):
            raise SimulationError(str(error)) from None
        if isinstance(error, OSError):
            raise SimulationError(f"cannot read {self._path}: {error.strerror}") from None
