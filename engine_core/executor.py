"""Who carries out a plan: one model runner in this process. The seam for more than one."""

import time
from typing import Protocol

from engine_core.model_runner.runner import ModelRunner
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs plans in order, one at a time."""

    model_time_s: float
    """Seconds spent in `execute`, all together."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. A plan of no tokens still tells which requests are over."""
        ...


class InProcessExecutor:
    """Runs every plan on one model runner, in this process."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.model_time_s = 0.0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        started_s = time.monotonic()
        try:
            return self._runner.execute(plan)
        finally:
            if plan.total_num_scheduled_tokens:
                self.model_time_s += time.monotonic() - started_s
