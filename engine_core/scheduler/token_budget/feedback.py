"""What is learnt from each step: its time, for token budget and preemption rule; tokens served,
for the policy."""

import numpy as np

from engine_core.scheduler.batch_state import Int64Array
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.preemption import PreemptionRule
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.rules.micro_batches import MicroBatches
from engine_core.scheduler.token_budget.base import (
    RunningSequences,
    StepLoad,
    TokenBudget,
    WaitingRequests,
)


class StepFeedback:
    """Asks the token budget before each step; feeds budget, rule and policy after it."""

    def __init__(
        self,
        pool: RequestPool,
        preemption: PreemptionRule,
        budget: TokenBudget,
        micro_batches: MicroBatches,
    ) -> None:
        self._pool = pool
        self._micro_batches = micro_batches
        self._policy = pool.policy
        self._preemption = preemption
        self._budget = budget
        self._last_end_s = 0.0
        """When the last step that was observed ended, on the scheduler's clock."""

    def choose_budget(self, now: float) -> int:
        """Most tokens of the step to be planned."""
        if not self._budget.looks_at_load:
            is_alone = len(self._pool.by_id) <= 1
            budget = self._budget
            most = budget.max_num_tokens if is_alone else budget.max_num_shared_tokens
            return self._micro_batches.limit(most)
        batch = self._pool.batch
        order = self._micro_batches.rows
        running = RunningSequences(
            num_tokens=batch.num_tokens[order],
            num_computed_tokens=batch.num_computed_tokens[order],
            num_prompt_tokens=batch.num_prompt_tokens[order],
            first_token_s=batch.first_token_s[order],
            arrival_s=batch.arrival_s[order],
            max_len=batch.max_len[order],
        )
        num_tokens = self._budget.num_tokens(now, running, self._waiting())
        return self._micro_batches.limit(num_tokens)

    def _waiting(self) -> WaitingRequests | None:
        pool = self._pool
        if not pool.waiting:
            return None
        num_requests = len(pool.waiting)
        return WaitingRequests(
            num_requests=num_requests,
            num_tokens=pool.num_queued_tokens,
            head_arrival_s=pool.waiting.peek_request().arrival_time,
            num_admissible=min(num_requests, pool.batch.max_num_rows - pool.num_reserved_rows),
        )

    def observe(self, step: InFlightStep, decoded: Int64Array, now: float) -> float:
        """A step is over; `decoded` are the rows that got a token as columns. Returns the seconds
        that it took, with those of the host behind the step before it, unless nothing was to do."""
        plan = step.plan
        # a step that was planned behind another began when that one ended
        began_s = max(step.planned_s, self._last_end_s) if step.is_behind else step.planned_s
        duration_s, host_s = now - began_s, began_s - self._last_end_s
        self._last_end_s = now
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
        return duration_s + (host_s if 0 <= host_s < duration_s else 0.0)

    def _count_service(self, decoded: Int64Array) -> None:
        served = self._pool.drain_served()
        if self._policy.has_one_tenant:
            num_others = sum(served.values()) if served else 0
            self._policy.on_decode_alone(len(decoded) + num_others)
            return
        tenants = self._pool.batch.tenant_number[decoded]
        if not served and not len(tenants):
            return
        totals = np.bincount(tenants, minlength=1 + max(served, default=0))
        for tenant, num_tokens in served.items():
            totals[tenant] += num_tokens
        self._policy.on_decode(totals)
