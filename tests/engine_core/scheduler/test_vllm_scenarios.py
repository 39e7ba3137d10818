"""The scenarios of vLLM's tests/v1/core/test_scheduler.py, in our terms."""

import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.scheduler import RequestStatus
from tests.engine_core.scheduler.vllm_names import num_tokens_with_spec

NAMES = [f"r{index}" for index in range(10)]
EOS = 2


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_all_that_fit_are_scheduled_at_once_with_all_that_the_runner_must_know(
    enable_prefix_caching,
):
    """Until then they wait. Proves S046, S212, S216, S217, S223."""
    requests = [make_request(name, 10 + index) for index, name in enumerate(NAMES)]
    scenario = Scenario(*requests, enable_prefix_caching=enable_prefix_caching)
    assert scenario.counts == (0, 10)
    assert scenario.scheduler.has_work()
    plan = scenario.plan()
    assert new_ids(plan) == plan.batch.req_ids == NAMES
    assert plan.num_scheduled_tokens == {r.request_id: r.num_prompt_tokens for r in requests}
    assert plan.total_num_scheduled_tokens == sum(r.num_prompt_tokens for r in requests)
    assert not plan.resumed_reqs
    assert not plan.finished_req_ids
    assert not plan.preempted_req_ids
    assert plan.copies.is_empty
    for data, request in zip(plan.scheduled_new_reqs, requests, strict=True):
        assert list(data.prompt_token_ids) == request.prompt_token_ids
        assert data.output_token_ids == []
        assert data.sampling_params == request.sampling_params
        assert data.num_computed_tokens == 0
        assert len(data.block_ids[0]) == -(-request.num_prompt_tokens // 16)
        assert 0 not in data.block_ids[0]
    assert len(set(plan.batch.rows.tolist())) == 10
    assert scenario.counts == (10, 0)
    scenario.update_with_array(plan)
    assert all(request.output_token_ids == [7] for request in requests)


@pytest.mark.parametrize(
    ("settings", "is_long"),
    [
        ({"max_num_partial_prefills": 2}, lambda _: True),
        (
            {"max_long_partial_prefills": 1, "long_prefill_token_threshold": 50},
            lambda request: request.num_prompt_tokens > 50,
        ),
    ],
)
def test_no_more_prompts_are_unfinished_at_once_than_allowed(settings, is_long):
    """Proves S089."""
    scenario = Scenario(
        *[make_request(name, 100 if index % 2 else 30) for index, name in enumerate(NAMES)],
        max_num_batched_tokens=64,
        max_chunk_size=16,
        **settings,
    )
    most = next(iter(settings.values()))
    seen = 0
    for _ in range(100):
        plan = scenario.plan()
        partial = [
            name
            for name in plan.num_scheduled_tokens
            if is_long(scenario.requests[name])
            and scenario.requests[name].num_computed_tokens
            < scenario.requests[name].num_prompt_tokens
        ]
        assert len(partial) <= most
        seen = max(seen, len(partial))
        scenario.update(plan)
    assert seen == most
    assert all(request.num_output_tokens for request in scenario.requests.values())


@pytest.mark.parametrize(
    ("options", "drafts", "sampled", "kept", "status", "stop_reason"),
    [
        ({}, [1, EOS, 3], [1, EOS], [1, EOS], RequestStatus.FINISHED_STOPPED, None),
        ({}, [EOS, 3], [EOS, 3, 4], [EOS], RequestStatus.FINISHED_STOPPED, None),
        (
            {"stop_token_ids": (42,)},
            [10, 42, 12],
            [10, 42, 12, 13],
            [10, 42],
            RequestStatus.FINISHED_STOPPED,
            42,
        ),
        ({"max_tokens": 3}, [10], [10, 11], [10, 11], RequestStatus.FINISHED_LENGTH, None),
        (
            {"ignore_eos": True},
            [10, EOS, 12],
            [10, EOS, 12, 13],
            [10, EOS, 12, 13],
            RequestStatus.RUNNING,
            None,
        ),
    ],
)
def test_a_stop_among_accepted_drafts_ends_that_request_there_and_no_other(
    options, drafts, sampled, kept, status, stop_reason
):
    """Proves S024, S035, S036, S228, S230."""
    stopping = make_request("stops", 4, eos_token_ids=[EOS], **options)
    other = make_request("other", 4, eos_token_ids=[EOS])
    scenario = Scenario(stopping, other)
    scenario.step()
    scenario.draft(stops=drafts, other=[20])
    plan = scenario.step(stops=sampled, other=[20, 21])
    assert plan.num_scheduled_tokens == {"stops": 1 + len(drafts), "other": 2}
    assert plan.scheduled_spec_decode_tokens == {"stops": drafts, "other": [20]}
    assert stopping.status is status
    assert stopping.output_token_ids == [7, *kept]
    output = scenario.outputs["stops"]
    assert output.new_token_ids == kept
    assert output.stop_reason == stop_reason
    assert output.finished == status.is_finished
    assert other.status is RequestStatus.RUNNING
    assert other.output_token_ids == [7, 20, 21]
    next_plan = scenario.step()
    assert next_plan.finished_req_ids == (["stops"] if status.is_finished else [])


@pytest.mark.parametrize(
    ("drafts", "sampled"),
    [
        ({"a": [1, 2, 3]}, {"a": [1, 2, 3, 4]}),
        ({"a": [1, 2, 3]}, {"a": [1, 5]}),
        ({"a": [1, 2], "b": [3]}, {"a": [1, 2, 5], "b": [3, 4]}),
        ({"a": [1], "b": []}, {"a": [1, 2], "b": [5]}),
        ({"a": [], "b": []}, {"a": [1], "b": [2]}),
        ({"a": [1, 2, 3], "b": [4, 5, 6]}, {"a": [1, 2, 7], "b": [8]}),
    ],
)
def test_drafts_are_scheduled_and_rejected_ones_are_computed_again(drafts, sampled):
    """Proves S032, S101, S215, S220."""
    scenario = Scenario(*[make_request(name, 5) for name in drafts])
    scenario.step()
    scenario.draft(**drafts)
    plan = scenario.step(**sampled)
    assert plan.num_scheduled_tokens == {name: 1 + len(ids) for name, ids in drafts.items()}
    assert plan.scheduled_spec_decode_tokens == {name: ids for name, ids in drafts.items() if ids}
    for name, ids in sampled.items():
        request = scenario.requests[name]
        assert request.output_token_ids == [7, *ids]
        assert request.num_computed_tokens == request.num_tokens - 1
        assert num_tokens_with_spec(request) == request.num_tokens
    assert scenario.step().num_scheduled_tokens == dict.fromkeys(drafts, 1)


def test_the_newest_gives_way_and_comes_back_with_what_is_left_in_the_cache():
    """Two prompts of five blocks in ten: a sixth block for the first costs the second its tail.
    Proves S014, S038, S082, S088, S108, S118, S119."""
    scenario = Scenario(
        make_request("first", 80, max_tokens=3), make_request("second", 80), num_blocks=10
    )
    assert scenario.step().num_scheduled_tokens == {"first": 80, "second": 80}
    plan = scenario.step()
    assert plan.num_scheduled_tokens == {"first": 1}
    assert plan.preempted_req_ids == ["second"]
    assert scenario.requests["second"].status is RequestStatus.PREEMPTED
    assert scenario.requests["second"].account.num_preemptions == 1
    assert scenario.counts == (1, 1)
    scenario.step()
    assert scenario.requests["first"].status is RequestStatus.FINISHED_LENGTH
    plan = scenario.step()
    (resumed,) = plan.resumed_reqs
    # four of its five blocks are there, the fifth was evicted; one token was sampled behind them
    assert resumed.num_computed_tokens == 64
    assert plan.num_scheduled_tokens == {"second": 81 - 64}
    assert list(resumed.token_ids) == scenario.requests["second"].all_token_ids[:81]
    assert len(resumed.block_ids[0]) == 6


def test_a_pool_too_small_for_everybody_serves_everybody_in_the_end():
    """And both queues keep the order of arrival through every preemption and return. Proves S005,
    S039, S045, S049, S107, S128."""
    requests = [
        make_request(name, 20 + index, max_tokens=30, arrival_time=index)
        for index, name in enumerate(NAMES)
    ]
    scenario = Scenario(*requests, num_blocks=12, scheduling_policy="fcfs")
    finished = []
    while scenario.scheduler.has_work():
        running = scenario.step().batch.req_ids
        finished += [name for name in running if scenario.requests[name].is_finished]
        infos = {name: scenario.scheduler.explain(name) for name in NAMES}
        waiting = [name for name in NAMES if infos[name].waits_for is not None]
        assert [*running, *waiting] == sorted([*running, *waiting], key=NAMES.index)
        assert [infos[name].num_requests_ahead for name in waiting] == list(range(len(waiting)))
    assert finished == NAMES
    assert all(request.num_output_tokens == 30 for request in requests)
    assert scenario.scheduler.statistics().num_preemptions > 0
    assert scenario.kv_cache.num_blocks_in_use == 0
