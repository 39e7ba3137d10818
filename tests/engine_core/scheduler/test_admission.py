"""The decided rules of admission: head-room for those that run, and the whole prompt at once."""

import itertools

import pytest
from scenario_help import Scenario, fresh_tokens, make_request, new_ids

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import RequestStatus
from engine_core.scheduler.records import prompt_report
from protocol.explanations import WaitReason


@pytest.mark.parametrize(("num_blocks", "head_room"), [(99, 0), (100, 1), (1000, 10)])
def test_one_block_in_a_hundred_is_kept_free_at_admission_by_default(num_blocks, head_room):
    """Proves S133."""
    assert KVCacheManager(num_blocks=num_blocks, block_size=4).watermark_blocks == head_room


@pytest.mark.parametrize(("num_tokens", "started"), [(50, ["a", "b"]), (51, ["a"])])
def test_a_prompt_is_long_beyond_the_threshold(num_tokens, started):
    """Proves S089."""
    scenario = Scenario(
        *[make_request(name, num_tokens) for name in "ab"],
        max_chunk_size=16,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=50,
    )
    assert list(scenario.step().num_scheduled_tokens) == started


def test_what_running_requests_report_of_their_prompts_is_bounded_together(monkeypatch):
    """One that is alone may ask for more."""
    asks = {"prompt_logprobs": 2}
    a, b, c, d = (make_request(name, 9, **asks) for name in "abcd")
    monkeypatch.setattr(prompt_report, "MAX_PROMPT_LOGPROBS", 3 * a.num_reported_values)
    scenario = Scenario(a, b, c, d, max_num_batched_tokens=16, max_chunk_size=4)
    assert scenario.step().num_scheduled_tokens == {"a": 4, "b": 4, "c": 4}
    info = scenario.scheduler.explain("d")
    assert info.waits_for is WaitReason.PROMPT_LOGPROBS
    assert f"together at most {3 * d.num_reported_values}" in info.why
    monkeypatch.setattr(prompt_report, "MAX_PROMPT_LOGPROBS", 1)
    assert Scenario(make_request("e", 9, **asks)).step().num_scheduled_tokens == {"e": 9}


@pytest.mark.parametrize(("watermark", "is_admitted"), [(0.0, True), (0.1, True), (0.2, False)])
def test_the_head_room_is_kept_at_admission_beside_others_and_only_there(watermark, is_admitted):
    """Ten blocks, four held, five wanted: one is left. Proves S133, S135."""
    scenario = Scenario(
        make_request("held", 14, max_tokens=50), num_blocks=10, block_size=4, watermark=watermark
    )
    scenario.step()
    scenario.add(make_request("new", 18))
    assert bool(new_ids(scenario.plan())) is is_admitted


def test_alone_a_request_that_was_admitted_before_may_use_the_head_room():
    """It has grown to all five blocks, of which four are for new ones. Proves S133, S135."""
    low = make_request("low", 15, max_tokens=5, priority=5)
    scenario = Scenario(
        low, num_blocks=5, block_size=4, watermark=0.2, scheduling_policy="priority"
    )
    for _ in range(3):
        scenario.step()
    scenario.add(make_request("high", 2, max_tokens=1))
    assert scenario.step().preempted_req_ids == ["low"]
    assert scenario.step().batch.req_ids == ["high"]
    assert low.num_tokens == 18
    assert scenario.step().batch.req_ids == ["low"]
    scenario.run_to_end(10)
    assert low.num_output_tokens == 5


def test_running_requests_use_up_the_head_room():
    """Proves S133, S138."""
    scenario = Scenario(make_request("a", 20), num_blocks=10, block_size=4, watermark=0.5)
    for _ in range(21):
        assert not scenario.step().preempted_req_ids
    assert scenario.kv_cache.num_blocks_free == 0


@pytest.mark.parametrize("batching", ["mixed", "prefill-first"])
def test_admission_looks_at_the_whole_prompt_and_at_reserved_blocks(batching):
    """Chunks of four are a block each; the prompts are five blocks of eight. Proves S107, S135."""
    scenario = Scenario(
        make_request("a", 20, max_tokens=2),
        make_request("b", 20, max_tokens=2),
        num_blocks=8,
        block_size=4,
        max_num_batched_tokens=16,
        max_chunk_size=4,
        batching=batching,
    )
    for plan in itertools.islice(iter(scenario.step, None), 6):
        assert not plan.preempted_req_ids
        assert "b" not in plan.num_scheduled_tokens or scenario.requests["a"].is_finished
    scenario.run_to_end()
    assert [request.account.num_preemptions for request in scenario.requests.values()] == [0, 0]


def test_a_prompt_in_the_cache_is_looked_at_for_what_it_lacks():
    """Of five blocks four are shared with a running one, so that it fits. Proves S088, S135."""
    prompt = fresh_tokens(16)
    scenario = Scenario(make_request("a", [*prompt, 1]), num_blocks=7, block_size=4)
    scenario.step()
    scenario.add(make_request("b", [*prompt, 2]))
    assert new_ids(scenario.plan()) == ["b"]


@pytest.mark.parametrize(("num_blocks", "is_admitted"), [(5, False), (6, True)])
def test_each_further_sample_has_room_for_its_next_token_and_the_slots_behind_it(
    num_blocks, is_admitted
):
    """Two blocks are held. Five tokens and three slots are two blocks; the second sample shares one
    full block, and its five tokens, the next one and three slots are three. Proves S090, S135."""
    scenario = Scenario(
        make_request("held", 2), num_blocks=num_blocks, block_size=4, num_lookahead_slots=3
    )
    scenario.step()
    scenario.add(make_request("r", 5, num_sequences=2))
    assert bool(new_ids(scenario.plan())) is is_admitted


def test_a_swapped_request_comes_back_only_with_room_for_its_next_token():
    """Its 80 tokens are five blocks, which are free when the small one has ended; the next token
    needs a sixth. Proves S083, S135."""
    scenario = Scenario(
        make_request("first", 80, max_tokens=8),
        make_request("small", 3, max_tokens=3),
        make_request("second", 79),
        num_blocks=11,
        num_host_blocks=8,
        preemption_mode="swap",
        enable_prefix_caching=False,
    )
    first, second = scenario.requests["first"], scenario.requests["second"]
    scenario.step()
    assert scenario.step().preempted_req_ids == ["second"]
    while not first.is_finished:
        assert second.status is RequestStatus.SWAPPED
        scenario.step()
    assert scenario.step().batch.req_ids == ["second"]
    assert (second.num_tokens, second.account.num_preemptions) == (81, 1)
