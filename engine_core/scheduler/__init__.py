"""What runs in the next step, and what becomes of the last one: numbers in, a plan out.

Must not know tensors, sockets, clocks or text."""

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.errors import (
    DeviceFault,
    DuplicateRequestId,
    QueueFull,
    SchedulerError,
    StepOrderError,
)
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.plan import NewRequestData, ScheduledBatch, SchedulerOutput
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.runner_output import DraftTokenIds, ModelRunnerOutput
from engine_core.scheduler.scheduler import PauseState, Scheduler

__all__ = [
    "DeviceFault",
    "DraftTokenIds",
    "DuplicateRequestId",
    "InFlightStep",
    "ModelRunnerOutput",
    "NewRequestData",
    "PauseState",
    "QueueFull",
    "Request",
    "RequestStatus",
    "ScheduledBatch",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "SchedulerOutput",
    "StepOrderError",
]
