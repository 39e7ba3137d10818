"""The limits of the waiting queue. Checks only."""

import dataclasses

from engine_core.scheduler.errors import QueueFull
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool


@dataclasses.dataclass(frozen=True, slots=True)
class QueueLimits:
    """Most waiting requests, and most tokens of theirs; None for no limit. Requests that were
    preempted count, and are never refused."""

    max_queued_requests: int | None
    max_queued_tokens: int | None

    def check(self, live: RequestPool, request: Request) -> None:
        """
        Raises:
            QueueFull: with this request the queue would be beyond a limit.
        """
        num_requests, num_tokens = len(live.waiting), live.num_queued_tokens
        if (self.max_queued_requests is not None and num_requests >= self.max_queued_requests) or (
            # an empty queue takes any request: it need not wait for others
            self.max_queued_tokens is not None
            and num_requests > 0
            and num_tokens + request.num_tokens > self.max_queued_tokens
        ):
            raise QueueFull(
                num_requests=num_requests,
                num_tokens=num_tokens,
                max_requests=self.max_queued_requests,
                max_tokens=self.max_queued_tokens,
                num_running=len(live.running),
            )
