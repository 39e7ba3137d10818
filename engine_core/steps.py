"""Launches steps and takes their results, in order; the fault of one ends none of the others."""

import logging
from collections.abc import Callable, Sequence

from engine_core.executor import InProcessExecutor
from engine_core.observers.base import FinishedStep, StepObserver, hooks_of
from engine_core.scheduler import InFlightStep, ModelRunnerOutput, Scheduler
from engine_core.server.outbox import Outbox
from protocol.outputs import EngineCoreOutputs

logger = logging.getLogger(__name__)


class Steps:
    """Keeps as many steps in flight as scheduler and executor do. Where that is 2:

    host     plan 1, submit | update 0, send | plan 2, submit | update 1, send | plan 3 ...
    device   [ step 0 ...        ][ step 1 ...                     ][ step 2 ...
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: InProcessExecutor,
        outbox: Outbox,
        observers: Sequence[StepObserver],
        clock: Callable[[], float],
    ) -> None:
        if scheduler.max_steps_in_flight > executor.max_steps_in_flight:
            raise ValueError(
                f"the scheduler plans {scheduler.max_steps_in_flight} steps ahead, the executor "
                f"runs {executor.max_steps_in_flight} at a time; build both with the same number"
            )
        self._scheduler = scheduler
        self._executor = executor
        self._outbox = outbox
        self._on_plan = hooks_of(observers, StepObserver.on_plan)
        self._on_outputs = hooks_of(observers, StepObserver.on_outputs)
        self._on_step = hooks_of(observers, StepObserver.on_step)
        self._clock = clock
        self._launch_fault: Exception | None = None
        """Why the last step in flight could not be launched; reported when it is collected."""
        self._may_launch = False
        """Whether a step has brought something since the last one was planned."""

    def launch(self) -> None:
        """Plan a step and launch it. Never fails: a fault is reported when the step is
        collected."""
        now_s, self._may_launch = self._clock(), False
        plan = self._scheduler.schedule(now=now_s)
        for notify in self._on_plan:
            notify(plan, now_s)
        try:
            self._executor.submit(plan)
        except Exception as error:
            self._launch_fault = error

    def to_collect(self) -> InFlightStep | None:
        """The oldest step, if its result is needed before the next step is planned: no more steps
        may be in flight, or the last one computes nothing and nothing has come since."""
        steps = self._scheduler.in_flight
        if not steps:
            return None
        is_full = len(steps) >= self._scheduler.max_steps_in_flight
        last = steps[-1]
        is_idle = not last.plan.total_num_scheduled_tokens or last.is_discarded
        waits = is_full or (is_idle and not self._may_launch) or self._launch_fault is not None
        return steps[0] if waits else None

    def complete(self, step: InFlightStep) -> None:
        """Wait for the oldest step and send what it brought.
        Raises DeviceFault: no step can be run any more, whichever requests it holds."""
        output = self._collect(step)
        now_s, self._may_launch = self._clock(), step.plan.total_num_scheduled_tokens > 0
        outputs = self._scheduler.update_from_output(
            step.plan, output, now=now_s, send=lambda outputs: self.send(outputs, now_s)
        )
        finished = FinishedStep(
            step.plan, output, step.planned_s, now_s, self._clock(), bool(outputs)
        )
        for notify in self._on_step:
            notify(finished)

    def settle(self) -> None:
        """Launch one more step and wait for all; the scheduler is paused, so it computes nothing.
        Raises DeviceFault: see `complete`."""
        for step in self._scheduler.in_flight:
            self.complete(step)
        self.launch()
        for step in self._scheduler.in_flight:
            self.complete(step)

    def send(self, outputs: dict[int, EngineCoreOutputs], now_s: float) -> None:
        """Give outputs by client index to observers, then to clients."""
        for notify in self._on_outputs:
            notify(outputs, now_s)
        self._outbox.send(outputs)

    def _collect(self, step: InFlightStep) -> ModelRunnerOutput:
        nothing = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        try:
            if self._launch_fault is not None and step is self._scheduler.in_flight[-1]:
                fault, self._launch_fault = self._launch_fault, None
                raise fault
            output = self._executor.collect()
        except Exception as error:
            if not step.is_discarded:
                logger.exception("step %d failed", step.plan.step_id)
                self._executor.check_device()
                why = f"the step failed: {type(error).__name__}: {error}"
                self._scheduler.discard_step(step.plan, why)
            return nothing
        if step.is_discarded:
            return nothing
        if step.plan.token_masks is not None:
            output.failures.update(step.plan.token_masks.failures())
            output.refused.update(step.plan.token_masks.refused())
        for request_id, why in output.failures.items():
            level = logging.DEBUG if request_id in output.refused else logging.ERROR
            logger.log(level, "request %r failed: %s", request_id, why)
        return output
