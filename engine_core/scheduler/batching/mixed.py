"""No phases: in each step every request catches up with its tokens, running ones first."""

from engine_core.scheduler.batching.turns import Turns
from engine_core.scheduler.plan_builder import PlanBuilder


class MixedBatching:
    """Prefill chunks and decodes share a step (Agrawal et al., Sarathi-Serve, OSDI 2024)."""

    def fill(self, plan: PlanBuilder, turns: Turns) -> None:
        turns.forced.preempt(plan)
        turns.running.fill(plan)
        turns.admit(plan)
