"""The limits that a scheduler is built with, and that of its waiting queue. Checks only."""

import dataclasses

from engine_core.scheduler.errors import QueueFull
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool

_MINIMUM = {"max_model_len": 2, "num_lookahead_slots": 0, "long_prefill_token_threshold": 0}


def check_limits(**limits: int | None) -> None:
    """
    Raises:
        ValueError: a limit below its minimum; None is no limit.
    """
    for name, value in limits.items():
        minimum = _MINIMUM.get(name, 1)
        if value is not None and value < minimum:
            raise ValueError(f"{name} is {value}, it must be at least {minimum}; raise it")


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """Most waiting requests, and most tokens of theirs; None for no limit. Requests that were
    preempted count, and are never refused."""

    max_requests: int | None
    max_tokens: int | None

    def check(self, live: RequestPool, request: Request) -> None:
        """
        Raises:
            QueueFull: with this request the queue would be beyond a limit.
        """
        num_requests, num_tokens = len(live.waiting), live.num_queued_tokens
        if (self.max_requests is not None and num_requests >= self.max_requests) or (
            # an empty queue takes any request: it need not wait for others
            self.max_tokens is not None
            and num_requests > 0
            and num_tokens + request.num_tokens > self.max_tokens
        ):
            raise QueueFull(
                num_requests=num_requests,
                num_tokens=num_tokens,
                max_requests=self.max_requests,
                max_tokens=self.max_tokens,
                num_running=len(live.running),
            )
