"""The scenarios of vLLM's first scheduler (tests/core/test_scheduler.py), in our terms.

Steps of prefill or decode, the delay before a prefill, swapping and its queue.
"""

import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.scheduler import RequestStatus
from protocol.outputs import FinishReason

SWAPPING = {"preemption_mode": "swap", "enable_prefix_caching": False, "num_blocks": 10}


def test_a_step_is_all_prefill_or_all_decode():
    """Proves S070, S071, S073, S099, S100."""
    scenario = Scenario(make_request("a", 10), make_request("b", 12), batching="prefill-first")
    assert scenario.step().num_scheduled_tokens == {"a": 10, "b": 12}
    assert scenario.step().num_scheduled_tokens == {"a": 1, "b": 1}
    scenario.add(make_request("c", 20))
    assert scenario.step().num_scheduled_tokens == {"c": 20}
    assert scenario.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}


def test_prompts_beyond_the_budget_wait_for_the_next_prefill_step():
    """Proves S060, S073, S099."""
    scenario = Scenario(
        *[make_request(name, 40) for name in "abc"],
        batching="prefill-first",
        max_num_batched_tokens=100,
    )
    assert scenario.step().num_scheduled_tokens == {"a": 40, "b": 40}
    assert scenario.step().num_scheduled_tokens == {"c": 40}
    assert scenario.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 1}


def test_a_prefill_waits_until_the_delay_has_passed_unless_nothing_runs():
    """The prefill of `a` took a second. Proves S084, S085, S086."""
    scenario = Scenario(make_request("a", 10), batching="prefill-first", prefill_delay_factor=0.5)
    assert scenario.step().num_scheduled_tokens == {"a": 10}
    plan = scenario.plan(seconds=1.0)
    assert plan.num_scheduled_tokens == {"a": 1}
    scenario.update(plan)
    scenario.add(make_request("b", 10, arrival_time=scenario.now))
    plan = scenario.plan(seconds=0.4)
    assert plan.num_scheduled_tokens == {"a": 1}
    scenario.update(plan)
    plan = scenario.plan(seconds=0.2)
    assert plan.num_scheduled_tokens == {"b": 10}
    scenario.update(plan)
    scenario.abort("a", "b")
    scenario.add(make_request("c", 10, arrival_time=scenario.now))
    assert scenario.plan(seconds=0.0).num_scheduled_tokens == {"c": 10}


def swapped_out(**settings) -> Scenario:
    """`first` and `second` held five blocks each; now `second` is swapped."""
    scenario = Scenario(
        make_request("first", 80, max_tokens=4),
        make_request("second", 80),
        **{**SWAPPING, "num_host_blocks": 8, **settings},
    )
    scenario.step()
    plan = scenario.step()
    assert plan.num_scheduled_tokens == {"first": 1}
    assert plan.preempted_req_ids == ["second"]
    if not settings:
        assert len(plan.copies.swap_out) == 5
        assert not plan.copies.swap_in
    return scenario


def test_a_swapped_request_comes_back_with_its_blocks_and_computes_nothing_again():
    """Proves S040, S083, S109, S112, S114, S116, S130, S141, S184."""
    scenario = swapped_out()
    second = scenario.requests["second"]
    assert second.status is RequestStatus.SWAPPED
    assert second.num_computed_tokens == 80
    statistics = scenario.scheduler.statistics()
    assert (statistics.num_swapped, statistics.num_preemptions_by_swap) == (1, 1)
    assert statistics.num_host_blocks_in_use == 5
    plan = scenario.step()
    while "first" in plan.num_scheduled_tokens:
        assert plan.copies.is_empty
        plan = scenario.step()
    assert plan.num_scheduled_tokens == {"second": 1}
    assert len(plan.copies.swap_in) == 5
    (resumed,) = plan.resumed_reqs
    assert resumed.num_computed_tokens == 80
    assert [device for _, device in plan.copies.swap_in] == resumed.block_ids[0][:5]
    assert second.status is RequestStatus.RUNNING
    assert scenario.scheduler.statistics().num_host_blocks_in_use == 0
    scenario.kv_cache.check()


def test_nothing_new_is_admitted_before_a_swapped_request():
    """Though a small one would fit. Proves S048, S122, S123."""
    scenario = swapped_out()
    scenario.add(make_request("small", 3))
    while not scenario.requests["first"].is_finished:
        assert scenario.step().num_scheduled_tokens == {"first": 1}
    plan = scenario.step()
    assert plan.batch.req_ids == ["second", "small"]
    assert new_ids(plan) == ["small"]


def test_an_aborted_swapped_request_gives_its_host_blocks_back():
    scenario = swapped_out()
    scenario.abort("second")
    assert scenario.scheduler.statistics().num_host_blocks_in_use == 0
    scenario.run_to_end()
    assert scenario.kv_cache.num_blocks_in_use == 0
    scenario.kv_cache.check()


def test_a_swapped_request_that_cannot_come_back_ends_with_a_reason():
    """It outgrew the whole cache. Proves S011, S124."""
    scenario = Scenario(
        make_request("alone", 60, max_tokens=200),
        **{**SWAPPING, "num_blocks": 5, "num_host_blocks": 8},
    )
    ended = []
    for _ in range(60):
        scenario.step()
        ended += [output for output in scenario.outputs.values() if output.finished]
    (output,) = ended
    assert output.finish_reason is FinishReason.LENGTH
    assert "blocks" in output.detail
    assert not scenario.scheduler.has_work()
    assert scenario.kv_cache.num_blocks_in_use == 0
    assert scenario.scheduler.statistics().num_host_blocks_in_use == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"preemption_mode": "sometimes"}, "sometimes"),
        ({"scheduling_policy": "lottery"}, "lottery"),
        ({"batching": "decode-first"}, "decode-first"),
    ],
)
def test_a_name_that_does_not_exist_is_refused(settings, words):
    """Proves S079, S110."""
    with pytest.raises(ValueError, match=words):
        Scenario(**settings)
