"""Steps between their planning and the taking in of their results.

Owns which result is waited for when, and how far a fault reaches. Must not know requests, or what
is done with a result.
"""

import dataclasses
import logging
from collections import deque
from collections.abc import Callable

from engine_core.executor import Executor
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

_MAX_FAULTS_IN_A_ROW = 3


@dataclasses.dataclass(frozen=True, slots=True)
class CollectedStep:
    plan: SchedulerOutput
    planned_s: float
    """When its planning began, in seconds of the loop's clock."""
    sampled: ModelRunnerOutput
    """Empty if the step failed."""


@dataclasses.dataclass(slots=True)
class _Step:
    plan: SchedulerOutput
    planned_s: float
    fault: Exception | None = None
    """Why it could not be launched: told when it is its turn."""
    is_void: bool = False
    """One before it failed: its requests have been told, and nothing comes of it."""


class StepsInFlight:
    """
    Args:
        max_num: most steps launched and not collected.
        discard: ends the requests of a plan that failed, and of all plans behind it, with a detail.
    """

    def __init__(
        self, executor: Executor, *, max_num: int, discard: Callable[[SchedulerOutput, str], None]
    ) -> None:
        if max_num > executor.max_steps_in_flight:
            raise ValueError(
                f"the scheduler plans {max_num} steps ahead, the executor runs "
                f"{executor.max_steps_in_flight} at a time; build both with the same number"
            )
        self.max_num = max_num
        self._executor = executor
        self._discard = discard
        self._steps: deque[_Step] = deque()
        self._faults_in_a_row = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def must_collect(self) -> bool:
        """Whether a result is to be taken in before the next step is planned: no more steps may be
        in flight, or the last one has nothing to run (what there is waits for a result)."""
        if not self._steps:
            return False
        last = self._steps[-1]
        is_idle = not last.plan.total_num_scheduled_tokens or last.is_void or last.fault is not None
        return is_idle or len(self._steps) >= self.max_num

    def launch(self, plan: SchedulerOutput, planned_s: float) -> None:
        """Never fails: what goes wrong is told in this step's turn."""
        step = _Step(plan, planned_s)
        try:
            self._executor.submit(plan)
        except Exception as error:
            step.fault = error
        self._steps.append(step)

    def collect(self) -> CollectedStep:
        """Wait for the oldest step. A fault ends the requests of this step and of those launched
        behind it, and no others.

        Raises:
            Exception: what the executor raised, if it was not the first time in a row.
        """
        step = self._steps.popleft()
        return CollectedStep(step.plan, step.planned_s, self._result_of(step))

    def _result_of(self, step: _Step) -> ModelRunnerOutput:
        plan = step.plan
        if step.is_void:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        try:
            if step.fault is not None:
                raise step.fault
            sampled = self._executor.collect()
        except Exception as error:
            self._faults_in_a_row += 1
            logger.exception("step %d failed", plan.step_id)
            for behind in self._steps:
                behind.is_void = True
            if self._faults_in_a_row >= _MAX_FAULTS_IN_A_ROW:
                raise
            self._discard(plan, f"the step failed: {type(error).__name__}: {error}")
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        if plan.total_num_scheduled_tokens:
            self._faults_in_a_row = 0
        for request_id, why in sampled.failures.items():
            logger.error("request %r failed: %s", request_id, why)
        return sampled

    def wait(self) -> None:
        """Until nothing runs. Results are dropped: nobody is there any more to be told."""
        while self._steps:
            step = self._steps.popleft()
            if step.is_void or step.fault is not None:
                continue
            try:
                self._executor.collect()
            except Exception as error:
                logger.error("step %d failed at the end: %s", step.plan.step_id, error)
                self._steps.clear()
