"""How many prompts may be computed in parts at once."""

from collections.abc import Iterable

from engine_core.scheduler.batch_state import Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.part import SchedulerPart, Why
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import WaitReason


class PartialPrefills(SchedulerPart):
    """Counts the prompts that take more than one step, so that a few very long ones do not take
    every step's budget from the short ones behind them."""

    def __init__(self, pool: RequestPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._max_num = config.max_num_partial_prefills
        self._max_num_long = config.max_long_partial_prefills
        self._long_threshold = config.long_prefill_token_threshold
        self._num = 0
        self._num_long = 0

    def begin_pass(self, plan: PlanBuilder) -> None:
        self.count(plan, self._pool.batch.order)

    def count(self, plan: PlanBuilder, rows: Int64Array) -> None:
        """Count the prompts in these rows that the plan, as it is, does not finish."""
        self._num = self._num_long = 0
        if self._max_num is None and self._max_num_long is None:
            return
        batch = self._pool.batch
        left = batch.num_tokens[rows] - batch.num_computed_tokens[rows]
        is_partial = (left > 1) & (left > plan.num_tokens_of(rows))
        for row in rows[is_partial].tolist():
            self._add(int(batch.num_tokens[row]))

    def on_admitted(self, request: Request, num_left: int, skipped: Iterable[Request]) -> None:
        if num_left:
            self._add(request.num_tokens)

    def _add(self, num_tokens: int) -> None:
        self._num += 1
        self._num_long += self._is_long(num_tokens)

    def _is_long(self, num_tokens: int) -> bool:
        return self._long_threshold is not None and num_tokens > self._long_threshold

    def why_wait(self, request: Request) -> Why | None:
        """Why a long prompt lets others pass, or None."""
        if self._max_num_long is None or not self._is_long(request.num_tokens):
            return None
        if self._num_long < self._max_num_long:
            return None
        why = f"{self._num_long} long prompts are being computed, the most allowed"
        return WaitReason.PARTIAL_PREFILLS, why

    def why_not_in_part(self) -> Why | None:
        if self._max_num is None or self._num < self._max_num:
            return None
        why = f"{self._num} prompts are partly computed, the most allowed"
        return WaitReason.PARTIAL_PREFILLS, why
