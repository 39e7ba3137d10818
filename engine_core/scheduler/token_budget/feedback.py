"""What steps teach: their time, for budget and preemption rule; tokens served, for the policy.

Owns the scheduler's notion of the present. Decides nothing itself.
"""

import numpy as np

from engine_core.scheduler.batch_state import Int32Array
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import PreemptionRule
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.token_budget.base import (
    NOTHING_RUNNING,
    RunningSequences,
    StepLoad,
    TokenBudget,
    WaitingRequests,
)


class StepFeedback:
    """Asks the budget before each step, and tells of each step after it."""

    def __init__(
        self,
        live: RequestPool,
        policy: SchedulingPolicy,
        preemption: PreemptionRule,
        budget: TokenBudget,
    ) -> None:
        self._live = live
        self._policy = policy
        self._preemption = preemption
        self._budget = budget
        self.now = 0.0
        """Seconds, at the last call with a time."""
        self._last_end_s = 0.0
        """Of the step that was observed last."""

    def choose_budget(self, now: float) -> int:
        """Most tokens of the step to be planned."""
        self.now = now
        if not self._budget.looks_at_load:
            return self._budget.num_tokens(now, NOTHING_RUNNING, None)
        rows = self._live.rows
        order = rows.order
        running = RunningSequences(
            num_tokens=rows.num_tokens[order],
            num_computed_tokens=rows.num_computed[order],
            num_prompt_tokens=rows.num_prompt[order],
            first_token_s=rows.first_token_s[order],
            arrival_s=rows.arrival_s[order],
            max_num_tokens=rows.stop_length[order],
        )
        return self._budget.num_tokens(now, running, self._waiting())

    def _waiting(self) -> WaitingRequests | None:
        live = self._live
        if live.waiting.is_empty:
            return None
        num_requests = len(live.waiting)
        return WaitingRequests(
            num_requests=num_requests,
            num_tokens=live.num_queued_tokens,
            head_arrival_s=live.waiting.peek_request().arrival_time,
            num_admissible=min(num_requests, len(live.rows.sequences) - live.num_reserved_rows),
        )

    def observe(self, step: InFlightStep, decoded: Int32Array, now: float) -> None:
        """A step is over; `decoded` are the rows that got a token as columns."""
        self.now = now
        plan = step.plan
        # one that was planned behind another began when that one ended
        began_s = max(step.planned_s, self._last_end_s) if step.is_behind else step.planned_s
        duration_s, self._last_end_s = now - began_s, now
        copies = plan.copies
        num_copied = len(copies.swap_in) + len(copies.swap_out) + len(copies.copy)
        self._preemption.observe(plan.total_num_scheduled_tokens, num_copied, duration_s)
        if self._budget.looks_at_load and plan.total_num_scheduled_tokens:
            counts = plan.batch.num_scheduled_tokens.astype(np.int64)
            context = plan.batch.num_computed_tokens + counts
            load = StepLoad(
                num_tokens=plan.total_num_scheduled_tokens,
                num_sequences=len(counts),
                num_context_tokens=int(context.sum()),
                num_attention_pairs=int((counts * context).sum()),
            )
            self._budget.observe(load, duration_s)
        if self._policy.counts_service:
            self._count_service(decoded)

    def _count_service(self, decoded: Int32Array) -> None:
        served = self._live.take_served()
        tenants = self._live.rows.tenant[decoded]
        if not served and not len(tenants):
            return
        totals = np.bincount(tenants, minlength=1 + max(served, default=0))
        for tenant, num_tokens in served.items():
            totals[tenant] += num_tokens
        self._policy.decoded(totals)
