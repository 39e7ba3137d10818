"""How many replicas a model needs, from the load and the SLO attainment that its engines report.
Ray Serve's controller calls `ScaleByLoad`; delays and limits are Serve's own."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

RUNNING, WAITING, SLO_MET, SLO_MISSED = "running", "waiting", "slo_met", "slo_missed"
"""What a replica reports; the last two of the look-back period."""

_MIN_REQUESTS = 5
"""Fewer say nothing of an attainment."""
_LOWER, _RAISE = 0.85, 1.05
_LOADED = 0.7
"""Of the target: SLOs that are met with fewer requests do not show that it could be higher."""


class Load(NamedTuple):
    """The load of all replicas of a model."""

    num_ongoing: float
    """Requests, running and waiting."""
    num_slo_met: float = 0.0
    num_slo_missed: float = 0.0


class ReplicaTarget(NamedTuple):
    num_ongoing: float
    """Requests that a replica should have."""
    changed_s: float = -math.inf


class Context(Protocol):
    """The part of Serve's `AutoscalingContext` that is read."""

    current_num_replicas: int
    target_num_replicas: int
    current_time: float
    policy_state: Mapping[str, Any]

    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None:
        """Means over the look-back period, by name and replica."""


class ScaleByLoad:
    """A custom autoscaling policy of Ray Serve: as many replicas as have `target` requests each.

    The target is `target_ongoing_requests` until too few requests meet the SLOs. Then it falls
    below the load at which they were missed, and rises again while they are met under load; it
    changes once in a look-back period, as two periods share no request then."""

    def __init__(
        self,
        *,
        target_ongoing_requests: float,
        target_slo_attainment: float,
        look_back_period_s: float,
    ) -> None:
        self._most_ongoing = target_ongoing_requests
        self._attainment = target_slo_attainment
        self._period_s = look_back_period_s

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """Replicas wanted (Serve rounds up), and the state for the next call."""
        state = context.policy_state.get("target", (self._most_ongoing,))
        target = ReplicaTarget(*state)
        found = context.aggregated_metrics or {}
        num_replicas = context.current_num_replicas
        wanted = float(context.target_num_replicas)  # stays where nothing is known
        if num_replicas and RUNNING in found:
            running, waiting, met, missed = (
                sum(found.get(each, {}).values())
                for each in (RUNNING, WAITING, SLO_MET, SLO_MISSED)
            )
            load = Load(running + waiting, met, missed)
            target = self.next_target(target, load, num_replicas, context.current_time)
            wanted = load.num_ongoing / target.num_ongoing
        return wanted, {"target": tuple(target)}

    def next_target(
        self, target: ReplicaTarget, load: Load, num_replicas: int, now_s: float
    ) -> ReplicaTarget:
        num_measured = load.num_slo_met + load.num_slo_missed
        if num_measured < _MIN_REQUESTS or now_s - target.changed_s < self._period_s:
            return target
        ongoing = load.num_ongoing / num_replicas
        if load.num_slo_met < self._attainment * num_measured:
            return ReplicaTarget(max(1.0, _LOWER * min(target.num_ongoing, ongoing)), now_s)
        if ongoing >= _LOADED * target.num_ongoing < self._most_ongoing:
            return ReplicaTarget(min(_RAISE * target.num_ongoing, self._most_ongoing), now_s)
        return target
