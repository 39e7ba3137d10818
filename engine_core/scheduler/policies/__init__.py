"""The policies: who is next, and who gives way. Each fills in engine_core.scheduler.policies.base.

They know requests by their urgency, arrival and tenant; no blocks, budgets, steps or clocks.
"""

from engine_core.scheduler.policies.fair import Fair
from engine_core.scheduler.policies.fcfs import FirstComeFirstServed, FirstComeFirstServedQueue
from engine_core.scheduler.policies.priority import Priority, PriorityQueue

__all__ = [
    "Fair",
    "FirstComeFirstServed",
    "FirstComeFirstServedQueue",
    "Priority",
    "PriorityQueue",
]
