"""A more urgent request waits: running ones give way though memory is free."""

from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import PreemptionMode, Preemptor
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.request_status import RequestStatus


class ForcedPreemption:
    """Asks the policy once a step. Its victims are computed again, behind the head of the queue."""

    def __init__(self, live: RequestPool, policy: SchedulingPolicy, preemptor: Preemptor) -> None:
        self._live = live
        self._policy = policy
        self._preemptor = preemptor

    def preempt(self, plan: PlanBuilder) -> int:
        """Returns how many gave way."""
        live = self._live
        if live.waiting.is_empty or not live.running:
            return 0
        head = live.waiting.peek_request()
        if head.status is RequestStatus.SWAPPED:
            return 0
        victims = self._policy.forced_victims(live.running)
        why = f"request {head.request_id!r} of priority {head.priority} is more urgent"
        for victim in victims:
            self._preemptor.preempt(victim, plan, why, PreemptionMode.RECOMPUTE)
        live.counters.num_preemptions_forced += len(victims)
        return len(victims)
