"""A request's state, and what each final one is called on the wire.

WAITING ──> RUNNING ──> FINISHED_*
             │   ^
             v   │
    PREEMPTED | SWAPPED       every state may go to FINISHED_* (abort, fault)
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
    SWAPPED = 3
    """Its blocks are in host memory; in front of all that wait and are not swapped."""
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    """Can never fit."""
    FINISHED_ERROR = 8

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
