"""A request's state, and what each final one is called on the wire.

WAITING ──> RUNNING ──> FINISHED_*
             │   ^
             v   │
           PREEMPTED          every state may go to FINISHED_* (abort, fault)
"""

import enum

from protocol.outputs import FinishReason


class RequestStatus(enum.IntEnum):
    """Ordered: all final states come last."""

    WAITING = 0
    """Not admitted yet."""
    RUNNING = 1
    """Holds blocks; may or may not be part of a given step."""
    PREEMPTED = 2
    """Lost its blocks; at the head of the waiting queue, to be computed again."""
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_IGNORED = 6
    """Can never fit."""
    FINISHED_ERROR = 7

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason:
        """What the client is told. Only for final states."""
        return _FINISH_REASONS[self]


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}
