"""The decided rules of giving way: who goes, how, where to, and who may come in the same step."""

import msgspec
import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.kv_cache import prefix_cache
from engine_core.kv_cache.block_hashes import extend_block_hashes
from engine_core.scheduler import RequestStatus
from engine_core.scheduler.preemption import MeasuredPreemption, PreemptionMode

SWAPPED = RequestStatus.SWAPPED
PREEMPTED = RequestStatus.PREEMPTED
RUNNING = RequestStatus.RUNNING


def crowded(**settings) -> Scenario:
    """Two prompts of five blocks fill ten; the first one's next token takes the second's."""
    crowd = {"num_blocks": 10, "enable_prefix_caching": False, **settings}
    scenario = Scenario(
        make_request("first", 80, max_tokens=4), make_request("second", 80), **crowd
    )
    scenario.step()
    return scenario


def test_what_was_hashed_before_a_preemption_is_not_hashed_again(monkeypatch):
    """Proves S028."""
    sizes = []

    def counted(hashes, parent, token_bytes, *args):
        sizes.append(len(token_bytes))
        extend_block_hashes(hashes, parent, token_bytes, *args)

    monkeypatch.setattr(prefix_cache, "extend_block_hashes", counted)
    scenario = crowded(enable_prefix_caching=True)
    scenario.run_to_end()
    second = scenario.requests["second"]
    assert second.account.num_preemptions
    # each full block once, the last token of either is never computed
    lengths = [each.num_tokens - 1 for each in scenario.requests.values()]
    assert sum(sizes) == sum(4 * 16 * (length // 16) for length in lengths)


# ---------------------------------------------------------------------- swapped ones come first


@pytest.mark.parametrize("batching", ["mixed", "prefill-first"])
def test_a_swapped_request_stands_in_front_of_those_that_waited_before_it(batching):
    """A small new one, there before it was swapped, would fit: it waits. Proves S040, S123."""
    scenario = crowded(preemption_mode="swap", num_host_blocks=8, batching=batching, max_num_seqs=2)
    scenario.add(make_request("small", 3))
    scenario.step()
    second, small = scenario.requests["second"], scenario.requests["small"]
    assert second.status is SWAPPED
    assert list(scenario.scheduler.pool.waiting) == [second, small]
    for _ in range(20):
        if second.status is not SWAPPED:
            break
        assert small.status is RequestStatus.WAITING
        assert scenario.kv_cache.num_blocks_free >= 1  # room for the small one
        scenario.step()
    assert second.status is RUNNING
    scenario.run_to_end()


def test_samples_come_back_in_a_step_that_has_just_a_token_for_each():
    scenario = Scenario(
        make_request("first", 8, max_tokens=30),
        make_request("pair", 8, num_sequences=2),
        num_blocks=7,
        num_host_blocks=30,
        block_size=4,
        max_num_batched_tokens=2,
    )
    pair = scenario.requests["pair"]
    for _ in range(60):
        if pair.status is SWAPPED:
            break
        scenario.update_with_array(scenario.plan())
    assert pair.status is SWAPPED
    scenario.abort("first")
    assert scenario.plan().num_scheduled_tokens == {"pair": 1, "pair#1": 1}


def test_a_swapped_request_stands_in_front_of_one_that_was_preempted_after_it():
    """In one step the pair is swapped, then the single one gives way too. Proves S040, S123."""
    scenario = Scenario(
        make_request("first", 15, max_tokens=40),
        make_request("single", 15),
        make_request("pair", 8, num_sequences=2),
        num_blocks=14,
        num_host_blocks=30,
        block_size=4,
    )
    pair, single = scenario.requests["pair"], scenario.requests["single"]
    for _ in range(40):
        scenario.update_with_array(scenario.plan())
        if single.account.num_preemptions:
            break
    assert (pair.status, single.status) == (SWAPPED, PREEMPTED)
    assert list(scenario.scheduler.pool.waiting) == [pair, single]


def test_prefill_first_swaps_in_behind_the_decodes_and_admits_no_new_request_in_that_step():
    """Rules 1 and 4 of that order: with a swapped request no prompt is admitted, and it comes
    back in a decode step, beside the running ones. Proves S071, S083, S123."""
    scenario = Scenario(
        make_request("first", 80, max_tokens=30),
        make_request("short", 80, max_tokens=3),
        make_request("second", 80),
        num_blocks=15,
        num_host_blocks=20,
        preemption_mode="swap",
        batching="prefill-first",
        enable_prefix_caching=False,
    )
    plans = [scenario.step(), scenario.step()]
    assert plans[1].preempted_req_ids == ["second"]
    scenario.add(make_request("new", 3))
    plans = [scenario.step().num_scheduled_tokens for _ in range(3)]
    assert plans == [{"first": 1, "short": 1}, {"first": 1, "second": 1}, {"new": 3}]


def test_under_policy_priority_a_swapped_request_outranks_a_more_urgent_new_one():
    """And is not forced out in the step in which it comes back. Proves S123, S080."""
    scenario = crowded(
        scheduling_policy="priority", preemption_mode="swap", num_host_blocks=8, max_num_seqs=2
    )
    plan = scenario.step()
    assert plan.preempted_req_ids == ["second"]
    urgent = make_request("urgent", 3, priority=-9)
    scenario.add(urgent)
    started = []
    for _ in range(60):
        plan = scenario.step()
        started += [data.req_id for data in plan.resumed_reqs] + new_ids(plan)
        # a head that is swapped forces none out for the urgent one behind it
        assert scenario.scheduler.statistics().num_preemptions_forced == 0 or started
    assert started[0] == "second"


# --------------------------------------------------------------- nothing else enters such a step


@pytest.mark.parametrize("batching", ["mixed", "prefill-first"])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_no_request_is_admitted_or_swapped_in_in_a_step_that_preempted(preemption, batching):
    """Though tokens, places and blocks are there: the victim gave back five. Proves S122."""
    scenario = crowded(preemption_mode=preemption, num_host_blocks=20, batching=batching)
    if batching == "mixed":
        scenario.add(make_request("small", 3))
    plan = scenario.step()
    assert plan.preempted_req_ids == ["second"]
    assert plan.batch.req_ids == ["first"]
    assert not plan.scheduled_new_reqs
    assert not plan.resumed_reqs
    assert not plan.copies.swap_in
    if preemption == "recompute" and batching == "mixed":
        assert scenario.requests["small"].status is RequestStatus.WAITING
    scenario.kv_cache.check()


# ---------------------------------------------------------------------- forced preemption


def test_victims_stand_behind_the_requester_and_before_their_equals():
    """Places are short: the request for two takes both. Proves S080, S044."""
    scenario = Scenario(
        make_request("a", 10, priority=5, arrival_time=1.0),
        make_request("b", 10, priority=7, arrival_time=2.0),
        scheduling_policy="priority",
        max_num_seqs=2,
    )
    scenario.step()
    scenario.add(
        make_request("equal", 10, priority=7, arrival_time=2.0),
        make_request("high", 10, priority=0, arrival_time=3.0, num_sequences=2),
    )
    plan = scenario.step()
    assert plan.preempted_req_ids == ["b", "a"]
    order = [request.request_id for request in scenario.scheduler.pool.waiting]
    assert order == ["high", "a", "b", "equal"]
    assert scenario.requests["a"].num_computed_tokens == 0  # recompute, whatever the rule says
    assert scenario.plan().batch.req_ids == ["high"]


def test_a_more_urgent_request_that_has_a_place_forces_none_out():
    """Rows, tokens and blocks are there. Proves S080."""
    scenario = Scenario(make_request("low", 10, priority=5), scheduling_policy="priority")
    scenario.step()
    scenario.add(make_request("high", 10))
    plan = scenario.step()
    assert plan.preempted_req_ids == []
    assert plan.batch.req_ids == ["low", "high"]


def test_the_fewest_give_way_the_worst_first_where_blocks_are_short():
    """The head wants six of ten blocks. Each running one has three, and one block is free: two of
    them go. Proves S080."""
    scenario = Scenario(
        *[make_request(name, 10, priority=p) for name, p in (("a", 7), ("b", 5), ("c", 9))],
        scheduling_policy="priority",
        num_blocks=10,
        block_size=4,
    )
    scenario.step()
    scenario.add(make_request("high", 21))
    assert scenario.step().preempted_req_ids == ["c", "a"]
    assert scenario.step().batch.req_ids == ["b", "high"]


def test_none_is_forced_out_for_a_head_that_cannot_run_even_then():
    """It wants nine of ten blocks, and one that is as urgent as it has three. The others go on
    until that one has ended, and no step is idle. Proves S080."""
    low = make_request("low", 10, priority=5, max_tokens=20)
    scenario = Scenario(
        make_request("equal", 9, max_tokens=3),
        low,
        scheduling_policy="priority",
        num_blocks=10,
        block_size=4,
    )
    scenario.step()
    scenario.add(high := make_request("high", 33, max_tokens=3))
    while not scenario.requests["equal"].is_finished:
        assert scenario.step().batch.req_ids == ["equal", "low"]
    assert scenario.step().preempted_req_ids == ["low"]
    assert scenario.step().batch.req_ids == ["high"]
    scenario.run_to_end()
    assert (high.num_output_tokens, low.account.num_preemptions) == (3, 1)


def test_none_is_forced_out_for_a_head_that_would_get_no_tokens():
    """A prompt as urgent as it takes every step's tokens: its place is taken when they are there.
    Proves S080."""
    scenario = Scenario(
        make_request("low", 4, priority=5),
        scheduling_policy="priority",
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    scenario.step()
    scenario.add(make_request("equal", 40))
    scenario.step()
    scenario.add(make_request("high", 10))
    preempted = []
    while scenario.requests["equal"].num_computed_tokens < 35:
        preempted += scenario.step().preempted_req_ids
    assert preempted == []
    assert scenario.step().preempted_req_ids == ["low"]
    assert "high" in scenario.step().batch.req_ids


def test_a_swapped_head_forces_none_out_however_urgent():
    """The head of a queue of two was swapped, and is more urgent than those that run. Proves S080,
    S123."""
    scenario = crowded(scheduling_policy="priority", preemption_mode="swap", num_host_blocks=8)
    scenario.step()
    second = scenario.requests["second"]
    assert second.status is SWAPPED
    second.message = msgspec.structs.replace(second.message, priority=-5)
    scenario.scheduler.pool.waiting.remove_request(second)
    scenario.scheduler.pool.waiting.prepend_request(second)
    while second.status is SWAPPED:
        assert scenario.step().preempted_req_ids == []
    assert scenario.scheduler.statistics().num_preemptions_forced == 0


def test_forced_victims_are_computed_again_also_where_the_rule_is_to_swap():
    """Proves S080."""
    scenario = Scenario(
        make_request("low", 40, priority=5),
        scheduling_policy="priority",
        preemption_mode="swap",
        num_host_blocks=50,
        max_num_seqs=1,
    )
    scenario.step()
    scenario.add(make_request("high", 10))
    scenario.step()
    assert scenario.requests["low"].status is PREEMPTED
    assert scenario.scheduler.statistics().num_preemptions_by_swap == 0


@pytest.mark.parametrize(("gain", "is_forced"), [(1, False), (2, False), (3, True), (4, True)])
def test_only_a_gain_of_at_least_the_minimum_forces_out(gain, is_forced):
    """Proves S080."""
    scenario = Scenario(
        make_request("low", 10, priority=5),
        scheduling_policy="priority",
        priority_min_gain=3,
        max_num_seqs=1,
    )
    scenario.step()
    scenario.add(make_request("high", 10, priority=5 - gain))
    assert bool(scenario.step().preempted_req_ids) is is_forced


# ---------------------------------------------------------------------- computed again or swapped


def test_of_two_victims_in_one_step_the_single_one_is_computed_again_and_the_pair_is_swapped():
    """Proves S111, S112."""
    scenario = Scenario(
        make_request("first", 32, max_tokens=30),
        make_request("pair", 12, num_sequences=2),
        make_request("single", 16),
        num_blocks=18,
        num_host_blocks=30,
        block_size=4,
    )
    modes = {}
    for _ in range(60):
        plan = scenario.plan()
        for name in ("single", "pair"):
            if scenario.requests[name].account.num_preemptions and name not in modes:
                modes[name] = scenario.requests[name].status
        scenario.update_with_array(plan)
    assert modes == {"single": PREEMPTED, "pair": SWAPPED}


def test_a_pair_without_room_on_the_host_is_computed_again_and_not_lost():
    """All its sequences give up their blocks and come back with their own tokens. Proves S113,
    S115."""
    pair = make_request("pair", 12, num_sequences=2, max_tokens=20)
    scenario = Scenario(
        make_request("first", 32, max_tokens=20),
        pair,
        num_blocks=14,
        num_host_blocks=1,
        block_size=4,
    )
    for _ in range(60):
        scenario.update_with_array(scenario.plan())
        if pair.account.num_preemptions:
            break
    assert pair.status is PREEMPTED
    assert [sequence.num_computed_tokens for sequence in pair.sequences] == [0, 0]
    assert scenario.scheduler.statistics().num_preemptions_by_swap == 0
    assert scenario.kv_cache.host.num_pinned == 0
    for _ in range(200):
        scenario.update_with_array(scenario.plan())
    assert not scenario.scheduler.has_work()
    assert [sequence.num_output_tokens for sequence in pair.sequences] == [20, 20]
    assert scenario.kv_cache.num_blocks_in_use == 0


def test_a_full_host_is_no_error_for_the_second_victim():
    """The first victim's blocks fill the host. Proves S115, S066."""
    scenario = Scenario(
        make_request("first", 32, max_tokens=30),
        make_request("second", 16),
        make_request("third", 16),
        num_blocks=17,
        num_host_blocks=5,
        block_size=4,
        preemption_mode="swap",
        enable_prefix_caching=False,
    )
    second, third = scenario.requests["second"], scenario.requests["third"]
    for _ in range(60):
        scenario.step()
        if second.account.num_preemptions:
            break
    assert (second.status, third.status) == (PREEMPTED, SWAPPED)
    scenario.run_to_end()
    assert [second.num_output_tokens, third.num_output_tokens] == [50, 50]
    assert scenario.requests["first"].num_output_tokens == 30


@pytest.mark.parametrize(
    ("block_s", "mode"),
    [
        (0.001, PreemptionMode.SWAP),
        (0.079, PreemptionMode.SWAP),
        (0.081, PreemptionMode.RECOMPUTE),
        (1.0, PreemptionMode.RECOMPUTE),
    ],
)
def test_auto_compares_the_measured_costs(block_s, mode):
    """Four blocks, there and back, against 64 tokens of 0.01 s each. Proves S110, S111."""
    rule = MeasuredPreemption(block_size=16)
    request = make_request("r", 64)
    request.sequences[0].num_computed_tokens = 64
    assert rule.mode(request) is PreemptionMode.SWAP  # so that a copy is measured
    rule.observe(100, 0, 1.0)
    rule.observe(100, 10, 1.0 + 10 * block_s)
    assert rule.mode(request) is mode
