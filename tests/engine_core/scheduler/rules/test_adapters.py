"""Adapters as the scheduler sees them: a limit on those in use, and keys and values apart."""

import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.scheduler import RequestStatus
from engine_core.scheduler.rules.adapters import AdapterSlots


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
    numbers = scenario.scheduler.statistics()
    assert (numbers.num_running_by_adapter, numbers.num_waiting_by_adapter) == ({"x": 2}, {"y": 1})
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
    assert list(scenario.scheduler.pool.waiting) == waiting
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


def loading(*requests, slots=1, **options):
    return Scenario(*requests, max_num_adapters=slots, loads_adapters=True, **options)


def test_a_request_waits_until_its_adapter_is_loaded_and_holds_up_no_other():
    """Proves S206, S208."""
    scenario = loading(with_adapter("a", "x"), with_adapter("plain", None), with_adapter("b", "y"))
    assert new_ids(scenario.step()) == ["plain"]
    scheduler, slots = scenario.scheduler, scenario.scheduler.parts.find(AdapterSlots)
    assert scheduler.explain("a").waits_for == "adapter loading"
    assert scheduler.explain("b").waits_for == "adapters"
    assert slots.take_to_load() == [("x", 0)]
    assert "a" not in scenario.step().num_scheduled_tokens
    assert slots.take_to_load() == []
    slots.on_loaded("x")
    assert new_ids(scenario.step()) == ["a"]
    scheduler.check()


def test_the_adapter_used_longest_ago_gives_its_slot_and_those_in_use_keep_theirs():
    """Proves S206, S207."""
    scenario = loading(slots=2)
    scheduler, slots = scenario.scheduler, scenario.scheduler.parts.find(AdapterSlots)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", "x")):
        scenario.add(with_adapter(name, adapter, max_tokens=2))
        scenario.step()
        for key, _ in slots.take_to_load():
            slots.on_loaded(key)
        scenario.step()
        scenario.step()
    scenario.add(with_adapter("d", "z", max_tokens=9))
    scenario.step()
    assert slots.take_to_load() == [("z", 1)]  # y's: x was used after it
    slots.on_loaded("z")
    scenario.step()
    scenario.add(with_adapter("e", "w"), with_adapter("f", "v"))
    scenario.step()
    assert slots.take_to_load() == [("w", 0)]  # z runs
    assert scheduler.explain("f").waits_for == "adapters"
    scheduler.check()


def test_an_adapter_that_nobody_asked_for_gets_a_free_slot_and_none_that_is_in_use():
    scenario = loading(with_adapter("a", "x"))
    scheduler, slots = scenario.scheduler, scenario.scheduler.parts.find(AdapterSlots)
    scenario.step()
    assert slots.reserve("y") is None  # x is being loaded
    assert slots.drop("x") == 0
    assert slots.take_to_load() == []
    assert slots.reserve("y") == 0
    assert slots.slot_of("y") == 0
    assert scheduler.requests_with_adapter("x") == ["a"]
    slots.on_loaded("y")
    scenario.step()
    assert slots.take_to_load() == [("x", 0)]  # y is not in use


def test_a_crowd_for_one_adapter_does_not_starve_another():
    """Proves S208: those that come later pass the waiting one 32 times, then none does."""
    scenario = Scenario(with_adapter("first", "x", max_tokens=3), max_num_adapters=1)
    scenario.step()
    scenario.add(with_adapter("other", "y", max_tokens=2))
    started = []
    for number in range(60):
        scenario.add(with_adapter(f"crowd {number}", "x", max_tokens=3))
        started += new_ids(scenario.step())
        if "other" in started:
            break
    assert started[-1] == "other" and 30 <= len(started) <= 34
    scenario.add(with_adapter("plain", None))
    assert "plain" in new_ids(scenario.step())


def test_a_crowd_that_waits_for_an_adapter_holds_up_no_request_without_one():
    crowd = [with_adapter(f"b{number}", "y") for number in range(200)]
    scenario = Scenario(with_adapter("a", "x"), *crowd, max_num_adapters=1)
    scenario.step()
    scenario.add(with_adapter("plain", None))
    assert new_ids(scenario.step()) == ["plain"]


def test_new_weights_and_sleep_empty_every_slot():
    scenario = loading(with_adapter("a", "x"))
    scheduler, slots = scenario.scheduler, scenario.scheduler.parts.find(AdapterSlots)
    scenario.step()
    [(key, slot)] = slots.take_to_load()
    scheduler.use_weights("others", 1)
    assert slots.slot_of(key) is None
    scenario.step()
    assert slots.take_to_load() == [(key, slot)]
