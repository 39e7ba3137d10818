"""Limits that hold a request back although memory is free: of the queue, and of prompts that are
partly computed at once."""

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.errors import QueueFull
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool


def check_queue(config: SchedulerConfig, pool: RequestPool, request: Request) -> None:
    """Preempted requests count, and are never refused. An empty queue takes any request.

    Raises:
        QueueFull: with this request the queue would be beyond a limit.
    """
    num_requests, num_tokens = len(pool.waiting), pool.num_queued_tokens
    max_requests, max_tokens = config.max_queued_requests, config.max_queued_tokens
    if (max_requests is not None and num_requests >= max_requests) or (
        max_tokens is not None and num_requests > 0 and num_tokens + request.num_tokens > max_tokens
    ):
        raise QueueFull(
            num_requests=num_requests,
            num_tokens=num_tokens,
            max_requests=max_requests,
            max_tokens=max_tokens,
            num_running=len(pool.running),
        )


class PartialPrefills:
    """Counts the prompts that take more than one step, so that a few very long ones do not take
    every step's budget from the short ones behind them."""

    def __init__(self, pool: RequestPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._max_num = config.max_num_partial_prefills
        self._max_num_long = config.max_long_partial_prefills
        self._long_threshold = config.long_prefill_token_threshold
        self._num = 0
        self._num_long = 0

    def count(self, plan: PlanBuilder) -> None:
        """Count the running prompts that this step does not finish."""
        self._num = self._num_long = 0
        if self._max_num is None and self._max_num_long is None:
            return
        batch = self._pool.batch
        order = batch.order
        left = batch.num_tokens[order] - batch.num_computed_tokens[order]
        is_partial = (left > 1) & (left > plan.num_tokens_of(order))
        for row in order[is_partial].tolist():
            self.add(int(batch.num_tokens[row]))

    def add(self, num_tokens: int) -> None:
        """A prompt of this length is not finished in this step."""
        self._num += 1
        self._num_long += self._is_long(num_tokens)

    def _is_long(self, num_tokens: int) -> bool:
        return self._long_threshold is not None and num_tokens > self._long_threshold

    def why_skip(self, request: Request) -> str | None:
        """Why this request lets others pass, or None."""
        if self._max_num_long is None or not self._is_long(request.num_tokens):
            return None
        if self._num_long < self._max_num_long:
            return None
        return f"{self._num_long} long prompts are being computed, the most allowed"

    def why_wait(self) -> str | None:
        """Why no prompt that needs more than one step may start, or None."""
        if self._max_num is None or self._num < self._max_num:
            return None
        return f"{self._num} prompts are partly computed, the most allowed"
