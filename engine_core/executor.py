"""Runs plans on a model runner in this process; the place to add execution by several workers."""

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from engine_core.distributed.collectives import SINGLE_RANK, Collectives
from engine_core.scheduler import DeviceFault, ModelRunnerOutput, SchedulerOutput
from protocol.calls import EngineStatistics


class StepRunner(Protocol):
    """Runs plans in order; `submit` and `collect` each see every plan once, in the same order."""

    max_steps_in_flight: int
    """Most plans submitted and not collected: 1 for submit, collect, submit, ..."""

    def submit(self, plan: SchedulerOutput) -> None:
        """Launch one step behind those in flight. A plan of no tokens still says which requests are
        over. Raises Exception: the step cannot be run, and is not to be collected; those before it
        are."""

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight.
        Raises Exception: it failed. Steps behind it are still to be collected."""

    def check_device(self) -> None:
        """After a fault. Raises Exception: the device takes no more work, whatever it is."""


class InProcessExecutor:
    """A `StepRunner` too: runs every plan on one model runner, in this process."""

    def __init__(self, runner: StepRunner, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.runner: StepRunner | None = runner
        """None while the engine sleeps: then plans have no tokens."""
        self._clock = clock
        self.max_steps_in_flight = runner.max_steps_in_flight
        self.model_time_s = 0.0
        """Seconds in which the model ran, in total."""
        self.collectives: Collectives = SINGLE_RANK
        """The collectives of the ranks that run the model."""
        self._num_in_flight = 0
        self._busy_since_s = 0.0

    def submit(self, plan: SchedulerOutput) -> None:
        if not self._num_in_flight:
            self._busy_since_s = self._clock()
        assert self.runner is not None or not plan.total_num_scheduled_tokens, "asleep"
        if self.runner is not None:
            self.runner.submit(plan)
        self._num_in_flight += 1

    def collect(self) -> ModelRunnerOutput:
        self._num_in_flight -= 1
        if self.runner is None:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        output = self.runner.collect()
        now_s = self._clock()
        if output.req_ids:
            self.model_time_s += now_s - self._busy_since_s
        self._busy_since_s = now_s
        return output

    def check_device(self) -> None:
        """After a step that failed. Raises DeviceFault: no other step can be run."""
        if self.runner is None:
            return
        try:
            self.runner.check_device()
        except Exception as error:
            raise DeviceFault(f"the device is lost: {type(error).__name__}: {error}") from error

    def add_statistics(self, numbers: EngineStatistics) -> EngineStatistics:
        collectives = self.collectives
        counts = list(collectives.counts.items())  # a stage's thread counts on
        return msgspec.structs.replace(
            numbers,
            model_time_s=self.model_time_s,
            num_workers=collectives.parallel.world_size,
            num_collective_bytes={part: each.num_bytes for part, each in counts},
            collective_time_s={part: each.seconds for part, each in counts},
        )

    def close(self) -> None:
        """Wait until nothing runs. Results are dropped."""
        while self._num_in_flight:
            with contextlib.suppress(Exception):
                self.collect()
