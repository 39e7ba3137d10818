"""Scheduling policies: which request is next and which is preempted."""

from typing import assert_never

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.policies.fair import Fair
from engine_core.scheduler.policies.fcfs import FirstComeFirstServed
from engine_core.scheduler.policies.priority import Priority


def make_policy(config: SchedulerConfig) -> SchedulingPolicy:
    match config.scheduling_policy:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return Priority(
                min_gain=config.priority_min_gain,
                force_preemption=config.force_preemption,
                ageing_s=config.priority_ageing_s,
            )
        case "fair":
            return Fair(config.tenant_weights)
        case unknown:
            assert_never(unknown)
