"""Step traces of the daemon (`engine-core --trace FILE`): settings, events, fits of step times."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.observers.trace_lines import (
    TraceEvent,
    TraceFormatError,
    TraceStep,
    read_header,
    read_trace,
)
from engine_core.scheduler import SchedulerConfig
from frontend.simulator import SimulationError
from frontend.simulator.step_times import FEATURES, FittedModel, StepWork, attention_pairs

_REQUIRED = {"num_blocks": int | list, "block_size": int, "scheduler": dict}


class StepTrace:
    def __init__(self, path: Path) -> None:
        self.path = path
        with _reading(path):
            self.settings: dict[str, Any] = read_header(path).config
        missing = [
            name
            for name, kind in _REQUIRED.items()
            if not isinstance(self.settings.get(name), kind)
        ]
        if missing:
            raise SimulationError(
                f"{path}: its first line does not say {', '.join(missing)}; trace the run again"
            )
        self.block_size: int = self.settings["block_size"]

    def events(self) -> Iterator[TraceEvent]:
        """Read anew each time."""
        with _reading(self.path):
            yield from read_trace(self.path)

    def scheduler_config(self) -> SchedulerConfig:
        settings = self.settings["scheduler"]
        known = {field.name for field in dataclasses.fields(SchedulerConfig)}
        if unknown := sorted(set(settings) - known):
            raise SimulationError(
                f"{self.path}: the scheduler has no setting {', '.join(unknown)}; replay it "
                "with the version that made it"
            )
        return SchedulerConfig(**settings)

    def make_cache(self) -> KVCacheManager:
        settings = self.settings
        groups = settings.get("groups") or [
            {"reach": window} for window in settings.get("sliding_windows") or [None]
        ]
        return KVCacheManager(
            num_blocks=settings["num_blocks"],
            block_size=settings["block_size"],
            groups=[KVCacheGroupSpec(**group) for group in groups],
            enable_prefix_caching=settings.get("enable_prefix_caching", True),
            watermark=settings.get("watermark", 0.01),
            num_host_blocks=settings.get("num_host_blocks", 0),
            checkpoint_interval=settings.get("state_checkpoint_interval", 0),
        )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of reading, as those of the simulator."""
    try:
        yield
    except TraceFormatError as error:
        raise SimulationError(str(error)) from None
    except OSError as error:
        raise SimulationError(f"cannot read {path}: {error.strerror}") from None


def fit_step_trace(path: Path) -> FittedModel:
    rows, durations_s = [], []
    for step, cycle_s in step_cycles(StepTrace(path).events()):
        if step.nums and cycle_s > 0:
            num_tokens = sum(step.nums)
            work = StepWork(
                num_tokens=num_tokens,
                num_sequences=len(step.nums),
                num_context_tokens=sum(step.context) + num_tokens,
                num_attention_pairs=attention_pairs(step.context, step.nums),
                num_copied_blocks=step.copies[0] + step.copies[1],
                num_sampled=0,  # no feature
            )
            rows.append(work.features)
            durations_s.append(cycle_s)
    features = np.array(rows, np.float64).reshape(len(rows), len(FEATURES))
    return FittedModel.from_rows(features, np.array(durations_s))


def step_cycles(events: Iterator[TraceEvent]) -> Iterator[tuple[TraceStep, float]]:
    """Each step, and the seconds from its planning to that of the next, the engine's own work
    between two steps included. Where the engine was idle in between, that work is what it was at
    the last step where it was not. A step that was planned while another ran began when that one
    ended."""
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
