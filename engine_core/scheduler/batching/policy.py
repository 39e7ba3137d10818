"""The interface of a batching: what a step is made of."""

from typing import Protocol

from engine_core.scheduler.batching.turns import Turns
from engine_core.scheduler.plan_builder import PlanBuilder


class BatchingPolicy(Protocol):
    """Fills each step's plan."""

    def fill(self, plan: PlanBuilder, turns: Turns) -> None:
        """Spend the plan's budget."""
        ...
