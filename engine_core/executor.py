"""Who carries out plans: one model runner in this process. The seam for more than one.

Owns when a step is launched and when its result is waited for. Must not know what a plan says.
"""

import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Runs plans in order; `submit` and `collect` each see every plan once, in the same order."""

    max_steps_in_flight: int
    """Most plans submitted and not collected: 1 for submit, collect, submit, ..."""
    model_time_s: float
    """Seconds in which the model ran, all together."""

    def submit(self, plan: SchedulerOutput) -> None:
        """Launch one step behind those in flight. A plan of no tokens still tells which requests
        are over.

        Raises:
            Exception: the step cannot be run, and is not to be collected; those before it are.
        """
        ...

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight.

        Raises:
            Exception: it failed. Nothing is in flight any more: what was launched behind it is
                worth nothing and forgotten.
        """
        ...


@runtime_checkable
class StepsInFlightRunner(Protocol):
    """Launches a step and goes on."""

    max_steps_in_flight: int

    def submit(self, plan: SchedulerOutput) -> None: ...

    def collect(self) -> ModelRunnerOutput: ...


class OneStepRunner(Protocol):
    """Returns when the step is done."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...


class InProcessExecutor:
    """Runs every plan on one model runner, in this process."""

    def __init__(self, runner: OneStepRunner | StepsInFlightRunner) -> None:
        self._runner = runner if isinstance(runner, StepsInFlightRunner) else _InTurn(runner)
        self.max_steps_in_flight = self._runner.max_steps_in_flight
        self.model_time_s = 0.0
        self._launched: deque[tuple[float, bool]] = deque()
        """When each step in flight was launched, and whether it computes tokens."""
        self._last_end_s = 0.0

    def submit(self, plan: SchedulerOutput) -> None:
        """See Executor."""
        launched_s = time.monotonic()
        self._runner.submit(plan)
        self._launched.append((launched_s, plan.total_num_scheduled_tokens > 0))

    def collect(self) -> ModelRunnerOutput:
        """See Executor."""
        launched_s, has_tokens = self._launched.popleft()
        try:
            return self._runner.collect()
        except Exception:
            self._forget_the_others()
            raise
        finally:
            ended_s = time.monotonic()
            if has_tokens:
                self.model_time_s += ended_s - max(launched_s, self._last_end_s)
            self._last_end_s = ended_s

    def _forget_the_others(self) -> None:
        while self._launched:
            self._launched.popleft()
            try:
                self._runner.collect()
            except Exception as error:
                logger.info("a step behind the one that failed gave %r", error)


class _InTurn:
    """A runner that does one step at a time."""

    max_steps_in_flight = 1

    def __init__(self, runner: OneStepRunner) -> None:
        self._runner = runner
        self._plan: SchedulerOutput | None = None

    def submit(self, plan: SchedulerOutput) -> None:
        assert self._plan is None, "the step before it has not been collected"
        self._plan = plan

    def collect(self) -> ModelRunnerOutput:
        plan, self._plan = self._plan, None
        assert plan is not None, "no step has been submitted"
        return self._runner.execute(plan)
