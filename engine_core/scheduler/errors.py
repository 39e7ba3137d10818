"""What the scheduler refuses.

SchedulerError
├── DuplicateRequestId (also ValueError)    the id belongs to an unfinished request
├── QueueFull                               the waiting queue is at its limit
└── StepOrderError (also RuntimeError)      a step was updated twice, never, or out of order
"""


class SchedulerError(Exception):
    """The scheduler refuses a call; its state is as before the call."""


class DuplicateRequestId(SchedulerError, ValueError):
    """The terminal output of a request with this id has not been handed out. It goes on."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"request_id {request_id!r} belongs to a live request; use another id, or send it "
            "again after that request's last output"
        )


class StepOrderError(SchedulerError, RuntimeError):
    """Each step is updated once, in order, and no more are in flight than allowed."""


class QueueFull(SchedulerError):
    """The waiting queue is at its limit. The request was not added; later it may be."""

    def __init__(
        self,
        *,
        num_requests: int,
        num_tokens: int,
        max_requests: int | None,
        max_tokens: int | None,
        num_running: int,
    ) -> None:
        limits = [
            f"{limit} {what} (--max-queued-{what})"
            for limit, what in ((max_requests, "requests"), (max_tokens, "tokens"))
            if limit is not None
        ]
        super().__init__(
            f"the queue is full: {num_requests} requests of {num_tokens} tokens wait and "
            f"{num_running} run, the limit is {' and '.join(limits)}; try again later"
        )
