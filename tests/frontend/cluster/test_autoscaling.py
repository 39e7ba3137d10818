"""How many replicas a load needs: the policy alone, and in a closed loop with engines whose SLOs
hold up to a load that the policy is not told."""

import dataclasses
import math
from typing import Any

import pytest

from frontend.cluster.autoscaling import ScaleByLoad


@dataclasses.dataclass
class Context:
    current_num_replicas: int
    aggregated_metrics: dict[str, dict[Any, float]]
    target_num_replicas: int = 1
    current_time: float = 1000.0
    policy_state: dict[str, Any] = dataclasses.field(default_factory=dict)


def policy(target_ongoing_requests=10.0):
    return ScaleByLoad(
        target_ongoing_requests=target_ongoing_requests,
        target_slo_attainment=0.9,
        look_back_period_s=30.0,
    )


def reported(*replicas):
    """Of each replica: running, waiting, SLOs met, missed."""
    names = ("running", "waiting", "slo_met", "slo_missed")
    return {
        name: {number: each[at] for number, each in enumerate(replicas)}
        for at, name in enumerate(names)
    }


@pytest.mark.parametrize(
    ("replicas", "wanted"),
    [
        ([(10, 0, 0, 0)], 1),
        ([(10, 25, 0, 0)], 4),  # those that wait count
        ([(10, 0, 0, 0), (0, 0, 0, 0)], 1),
        ([(0, 0, 0, 0)], 0),
        ([(5, 0, 0, 0), (6, 0, 0, 0)], 2),
        ([(10, 0, 2, 2)], 1),  # too few to say anything
        ([(10, 0, 95, 5)], 1),
        ([(4, 0, 80, 20)], 2),  # SLOs are missed below the target
        ([(4, 0, 80, 20), (4, 0, 50, 50)], 3),
    ],
)
def test_replicas_follow_requests_and_attainment(replicas, wanted):
    found, _ = policy()(Context(len(replicas), reported(*replicas)))
    assert math.ceil(found) == wanted


def test_where_nothing_is_known_the_number_stays():
    for context in (Context(0, {}, 1), Context(3, {}, 3), Context(0, reported((9, 9, 0, 0)), 2)):
        wanted, _ = policy()(context)
        assert wanted == context.target_num_replicas


def test_the_target_changes_once_in_a_period():
    scale = policy()
    missed = reported((8, 0, 0, 50))
    _, state = scale(Context(1, missed))
    first = state["target"]
    _, state = scale(Context(1, missed, current_time=1029, policy_state=state))
    assert state["target"] == first
    _, state = scale(Context(1, missed, current_time=1030, policy_state=state))
    assert state["target"][0] < first[0]


def served(bearable, total, periods):
    """Replicas after each look-back period, where SLOs hold up to `bearable` requests each."""
    scale, state, num, history = policy(32.0), {}, 1, []
    for period in range(periods):
        each = total / num
        met = 100 if each <= bearable else 20
        found = reported(*[(each, 0, met / num, (100 - met) / num)] * num)
        wanted, state = scale(Context(num, found, num, period * 31.0, state))
        num = min(20, max(1, math.ceil(wanted - 1e-9)))
        history.append(num)
    return history


@pytest.mark.parametrize(("bearable", "total"), [(5, 40), (12, 100), (25, 30), (40, 90)])
def test_the_loop_finds_the_replicas_that_keep_slos_and_few_more(bearable, total):
    history = served(bearable, total, 100)
    needed = math.ceil(total / min(bearable, 32))
    settled = history[40:]
    assert min(settled) >= needed - 1  # it looks now and then whether fewer do
    assert max(settled) <= math.ceil(1.3 * needed) + 1
    assert sum(each >= needed for each in settled) >= 0.8 * len(settled)


def test_load_that_no_number_of_replicas_bears_ends_at_one_request_each():
    assert served(0.5, 6, 100)[-1] == 6
