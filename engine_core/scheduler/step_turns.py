"""Whose turn it is: each step is planned once, then updated once. Knows steps, not requests.

One step is open at a time. Its requests may all have ended before its update (a fault, the end of
the daemon): nothing can come of it then, and it does not stand in the way of the next.
"""

from collections.abc import Container

from engine_core.scheduler.errors import StepOrderError
from engine_core.scheduler.step import SchedulerOutput


class StepTurns:
    """Gives out step ids and holds the open step."""

    def __init__(self) -> None:
        self.next_step_id = 0
        self._open: SchedulerOutput | None = None

    def num_open_tokens(self, request_id: str) -> int:
        """Tokens of the request in the open step, 0 if it has none."""
        return 0 if self._open is None else self._open.num_scheduled_tokens.get(request_id, 0)

    def check_may_plan(self, live_request_ids: Container[str]) -> None:
        """
        Raises:
            StepOrderError: a step with live requests is open.
        """
        if self._open is not None and any(
            request_id in live_request_ids for request_id in self._open.num_scheduled_tokens
        ):
            raise StepOrderError(
                f"step {self._open.step_id} has not been updated; call update_from_output with "
                "its result (or discard_step first, if it has none) before the next schedule"
            )

    def planned(self, step: SchedulerOutput) -> None:
        """`step` is open now."""
        assert step.step_id == self.next_step_id
        self._open = step
        self.next_step_id += 1

    def check_open(self, step: SchedulerOutput) -> None:
        """
        Raises:
            StepOrderError: `step` is not the open one.
        """
        if self._open is None or step.step_id != self._open.step_id:
            due = "none is due" if self._open is None else f"step {self._open.step_id} is due"
            raise StepOrderError(
                f"step {step.step_id} is not to be updated, {due}; update each step once, in order"
            )

    def updated(self, step: SchedulerOutput) -> None:
        """Close `step`.

        Raises:
            StepOrderError: `step` is not the open one.
        """
        self.check_open(step)
        self._open = None
