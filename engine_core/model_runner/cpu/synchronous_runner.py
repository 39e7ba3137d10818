"""What runners share whose device is the processor that plans: nothing runs beside the host."""

from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput


class SynchronousRunner:
    """One step at a time: it is computed when it is collected."""

    max_steps_in_flight = 1
    _in_flight: SchedulerOutput | None = None

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step.
        Raises Exception: whatever the model raises; the plan's requests cannot go on."""
        raise NotImplementedError

    def submit(self, plan: SchedulerOutput) -> None:
        """Take the step that the next `collect` runs."""
        assert self._in_flight is None, "collect the step in flight first"
        self._in_flight = plan

    def collect(self) -> ModelRunnerOutput:
        """See `execute`."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "no step is in flight"
        return self.execute(plan)

    def check_device(self) -> None:
        """A CPU takes work as long as the process lives."""
