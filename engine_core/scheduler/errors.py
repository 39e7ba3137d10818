"""What the scheduler refuses.

SchedulerError
├── DuplicateRequestId (also ValueError)    the id belongs to an unfinished request
├── DeviceFault                             steps fail whichever requests they hold
├── QueueFull                               the waiting queue is at its limit
└── StepOrderError (also RuntimeError)      a step was updated twice, never, or out of order
"""


class SchedulerError(Exception):
    """The scheduler refuses a call; its state is as before the call."""


class DuplicateRequestId(SchedulerError, ValueError):
    """The terminal output of a request with this id has not been handed out. It goes on."""


class StepOrderError(SchedulerError, RuntimeError):
    """Each step is updated once, in order, and no more are in flight than allowed."""


class QueueFull(SchedulerError):
    """The waiting queue is at its limit. The request was not added; later it may be."""


class DeviceFault(SchedulerError):
    """No step can be run any more, and no request is to blame; unlike for the others, the scheduler
    cannot go on."""
