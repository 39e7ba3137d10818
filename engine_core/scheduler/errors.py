"""What the scheduler refuses.

SchedulerError
├── DuplicateRequestId (also ValueError)    the id belongs to a live request
└── StepOrderError (also RuntimeError)      a step was updated twice, never, or out of order
"""


class SchedulerError(Exception):
    """The scheduler refuses a call; its state is as before the call."""


class DuplicateRequestId(SchedulerError, ValueError):
    """A request with this id is live: its terminal output has not been handed out. It goes on."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id {request_id!r} belongs to a live request; use another id, or send it "
            "again after that request's last output"
        )
        self.request_id = request_id


class StepOrderError(SchedulerError, RuntimeError):
    """schedule() and update_from_output() must take turns, each step once."""
