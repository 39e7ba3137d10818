"""How many prompts may be under way at once: limits on prompts that take more than one step.

So that a few very long prompts do not take every step's budget from the short ones behind them.
"""

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool


class PartialPrefills:
    """Counts the prompts that are partly computed."""

    def __init__(self, live: RequestPool, config: SchedulerConfig) -> None:
        self._live = live
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
        rows = self._live.rows
        order = rows.order
        left = rows.num_tokens[order] - rows.num_computed[order]
        is_partial = (left > 1) & (left > plan.num_tokens_of(order))
        for row in order[is_partial].tolist():
            self._add(int(rows.num_tokens[row]))

    def started(self, request: Request) -> None:
        """A request was admitted and is not finished in this step."""
        self._add(request.num_tokens)

    def _add(self, num_tokens: int) -> None:
        self._num += 1
        self._num_long += self._is_long(num_tokens)

    def _is_long(self, num_tokens: int) -> bool:
        return self._long_threshold is not None and num_tokens > self._long_threshold

    def why_skip(self, request: Request) -> str | None:
        """Why this one lets others pass, or None."""
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
