"""Adapters as the scheduler sees them: a limit on those in use, and keys and values apart."""

import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.scheduler import RequestStatus


def with_adapter(name: str, adapter: str | None, prompt=10, **options):
    return make_request(name, prompt, adapter=adapter, **options)


def test_a_request_beyond_the_adapters_in_use_waits_and_others_pass_it():
    """Proves S025, S207, S208."""
    scenario = Scenario(
        with_adapter("a", "x", max_tokens=3),
        with_adapter("b", "y", max_tokens=3),
        with_adapter("c", "x"),
        with_adapter("d", None),
        max_num_adapters=1,
    )
    plan = scenario.step()
    assert list(plan.num_scheduled_tokens) == ["a", "c", "d"]
    assert [data.lora_request for data in plan.scheduled_new_reqs] == ["x", "x", None]
    info = scenario.scheduler.explain("b")
    assert info.waits_for == "adapters"
    assert "the adapters in use are 1" in info.why
    # its place is kept: it is the head once the adapter is free
    scenario.add(with_adapter("e", "z"))
    scenario.scheduler.finish_requests(["a", "c"], RequestStatus.FINISHED_ABORTED)
    assert "b" in scenario.step().num_scheduled_tokens
    assert scenario.scheduler.explain("e").waits_for == "adapters"


@pytest.mark.parametrize("policy", ["fcfs", "fair", "priority"])
def test_those_that_others_passed_keep_their_order(policy):
    """Proves S047, S048."""
    waiting = [with_adapter(name, "y", arrival_time=at) for at, name in enumerate("bcde")]
    scenario = Scenario(
        with_adapter("a", "x", max_tokens=2), *waiting, scheduling_policy=policy, max_num_adapters=1
    )
    scenario.step()
    assert list(scenario.scheduler._pool.waiting) == waiting
    scenario.step()
    assert new_ids(scenario.step()) == ["b", "c", "d", "e"]


def test_a_preempted_requests_adapter_is_free_for_others():
    """Proves S129."""
    low = with_adapter("low", "x", priority=5, arrival_time=1.0)
    scenario = Scenario(low, scheduling_policy="priority", max_num_adapters=1)
    scenario.step()
    scenario.add(with_adapter("high", "y", priority=0, arrival_time=2.0))
    assert scenario.step().preempted_req_ids == ["low"]
    assert list(scenario.step().num_scheduled_tokens) == ["high"]
    assert scenario.scheduler.explain("low").waits_for == "adapters"


def test_adapters_never_share_keys_and_values():
    """Proves S209."""
    prompt = list(range(100, 140))
    scenario = Scenario(with_adapter("a", "x", prompt), block_size=4)
    scenario.step()
    scenario.add(
        with_adapter("same", "x", prompt),
        with_adapter("other", "y", prompt),
        with_adapter("none", None, prompt),
    )
    found = {data.req_id: data.num_computed_tokens for data in scenario.step().scheduled_new_reqs}
    assert found == {"same": 36, "other": 0, "none": 0}
    info = scenario.scheduler.explain("other")
    assert info.cache_lookup.ended == "other salt or adapter"
