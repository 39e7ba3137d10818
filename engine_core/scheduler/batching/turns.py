"""The turns that a composition orders, and how they are put together."""

import dataclasses

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.explanations import Explanations
from engine_core.scheduler.forced_preemption import ForcedPreemption
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.preemption import PreemptionRule, Preemptor
from engine_core.scheduler.request_pool import RequestPool
from engine_core.scheduler.schedule_running import RunningScheduler
from engine_core.scheduler.schedule_waiting import WaitingScheduler
from protocol.explanations import WaitReason


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """What a step is put together from."""

    live: RequestPool
    preemptor: Preemptor
    forced: ForcedPreemption
    running: RunningScheduler
    admission: WaitingScheduler
    explanations: Explanations

    def admit(
        self, plan: PlanBuilder, *, only_swapped: bool = False, whole_prompts: bool = False
    ) -> None:
        """The waiting requests' turn; nobody's in a step that preempted."""
        if plan.has_preempted:
            why = "a request was preempted in this step"
            self.explanations.stopped_at(None, WaitReason.PREEMPTION, why)
        else:
            self.admission.fill(plan, only_swapped=only_swapped, whole_prompts=whole_prompts)


def assemble_turns(
    live: RequestPool,
    kv_cache: KVCacheManager,
    policy: SchedulingPolicy,
    preemption: PreemptionRule,
    explanations: Explanations,
    config: SchedulerConfig,
) -> Turns:
    """One scheduler's turns."""
    preemptor = Preemptor(live, kv_cache, preemption)
    return Turns(
        live=live,
        preemptor=preemptor,
        forced=ForcedPreemption(live, policy, preemptor),
        running=RunningScheduler(live, kv_cache, policy, preemptor, config),
        admission=WaitingScheduler(live, kv_cache, policy, explanations, config),
        explanations=explanations,
    )
