"""How many requests and tokens may wait."""

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.errors import QueueFull
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool


class QueueLimits(SchedulerPart):
    """Preempted and resumed requests count, and are never refused. An empty queue takes any
    request."""

    def __init__(self, pool: RequestPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._max_requests = config.max_queued_requests
        self._max_tokens = config.max_queued_tokens

    def check_request(self, request: Request) -> None:
        """Raises QueueFull if as many requests or tokens wait as may."""
        if request.message.is_resumed:
            return
        pool, max_requests, max_tokens = self._pool, self._max_requests, self._max_tokens
        num_requests, num_tokens = pool.num_waiting, pool.num_queued_tokens
        if (max_requests is not None and num_requests >= max_requests) or (
            max_tokens is not None
            and num_requests > 0
            and num_tokens + request.num_tokens > max_tokens
        ):
            pool.counters.num_refused += 1
            limits = [
                f"{limit} {what} (--max-queued-{what})"
                for limit, what in ((max_requests, "requests"), (max_tokens, "tokens"))
                if limit is not None
            ]
            raise QueueFull(
                f"the queue is full: {num_requests} requests of {num_tokens} tokens wait and "
                f"{len(pool.running)} run, the limit is {' and '.join(limits)}; try again later"
            )
