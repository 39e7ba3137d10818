"""The scenarios of priority scheduling in vLLM's tests/v1/core/test_scheduler.py, in our terms.

Unlike there, a waiting request that outranks running ones takes their place where there is no other
(forced preemption), unless that is switched off.
"""

import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.scheduler import RequestStatus


def queued(priorities: list[int], arrivals: list[float], **settings) -> Scenario:
    requests = [
        make_request(f"r{index}", 10, priority=priority, arrival_time=arrival)
        for index, (priority, arrival) in enumerate(zip(priorities, arrivals, strict=True))
    ]
    return Scenario(*requests, scheduling_policy="priority", **settings)


@pytest.mark.parametrize(
    ("priorities", "arrivals", "order"),
    [
        ([2, 0, 1], [0.0, 0.0, 0.0], ["r1", "r2", "r0"]),
        ([0, 0, 0], [3.0, 1.0, 2.0], ["r1", "r2", "r0"]),
        ([2, 1, 1, 0], [1.0, 3.0, 2.0, 4.0], ["r3", "r2", "r1", "r0"]),
        ([0, -5, 5], [1.0, 2.0, 3.0], ["r1", "r0", "r2"]),
    ],
)
def test_the_most_urgent_comes_first_and_the_earlier_of_equals(priorities, arrivals, order):
    """Proves S018, S042, S043, S078, S079."""
    assert new_ids(queued(priorities, arrivals).step()) == order


def test_who_is_preempted_for_memory_is_the_least_urgent_not_the_newest():
    """Proves S044, S120."""
    low = make_request("low", 8, priority=5, arrival_time=1.0)
    high = make_request("high", 8, priority=0, arrival_time=2.0)
    scenario = Scenario(
        low, scheduling_policy="priority", num_blocks=6, block_size=4, force_preemption=False
    )
    scenario.step()
    scenario.add(high)
    assert new_ids(scenario.step()) == ["high"]
    preempted = []
    while not preempted:
        preempted = scenario.step().preempted_req_ids
    assert preempted == ["low"]
    assert low.status is RequestStatus.PREEMPTED
    assert high.status is RequestStatus.RUNNING
    assert high.account.num_preemptions == 0


def test_tokens_of_a_victim_that_was_scheduled_already_are_given_back():
    """The requester comes behind its victim in the step. Proves S056, S120."""
    low = make_request("low", 2, priority=5, arrival_time=1.0)
    high = make_request("high", 4, priority=0, arrival_time=2.0)
    scenario = Scenario(
        low, scheduling_policy="priority", num_blocks=2, block_size=4, force_preemption=False
    )
    scenario.step()
    scenario.add(high)
    assert scenario.step().num_scheduled_tokens == {"low": 1, "high": 4}
    plan = scenario.step()
    assert plan.num_scheduled_tokens == {"high": 1}
    assert plan.total_num_scheduled_tokens == 1
    assert plan.preempted_req_ids == ["low"]
    scenario.kv_cache.check()


def test_a_more_urgent_request_takes_the_place_of_a_running_one_and_gives_it_back():
    """Memory is free, places are not. Proves S080."""
    low = make_request("low", 10, priority=5, arrival_time=1.0)
    high = make_request("high", 10, priority=0, arrival_time=2.0, max_tokens=5)
    scenario = Scenario(low, scheduling_policy="priority", max_num_seqs=1)
    scenario.step()
    scenario.add(high)
    plans = [scenario.step(), scenario.step()]
    assert "low" in plans[0].preempted_req_ids
    assert high.status is RequestStatus.RUNNING
    assert low.status is RequestStatus.PREEMPTED
    assert scenario.scheduler.statistics().num_preemptions_forced == 1
    while not high.is_finished:
        assert low.status is RequestStatus.PREEMPTED
        scenario.step()
    scenario.run_to_end()
    assert low.num_output_tokens == 50
    assert low.account.num_preemptions == 1


def test_the_least_urgent_gives_way_where_places_are_short_and_the_others_go_on():
    """One place is wanted; no request is admitted in the step that preempted; then the head, and
    the victim behind it. Proves S080, S122."""
    worst = make_request("worst", 10, priority=9, arrival_time=1.0)
    low = make_request("low", 10, priority=5, arrival_time=1.0)
    equal = make_request("equal", 10, priority=0, arrival_time=1.0)
    scenario = Scenario(low, worst, equal, scheduling_policy="priority", max_num_seqs=3)
    scenario.step()
    scenario.add(make_request("high", 10, priority=0, arrival_time=2.0))
    plan = scenario.step()
    assert plan.preempted_req_ids == ["worst"]
    assert plan.num_scheduled_tokens == {"equal": 1, "low": 1}
    assert scenario.scheduler.statistics().num_preemptions_forced == 1
    assert list(scenario.step().num_scheduled_tokens) == ["equal", "low", "high"]
    assert scenario.counts == (3, 1)
