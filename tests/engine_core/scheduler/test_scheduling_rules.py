"""Where the designs that the required behaviour comes from disagree, one rule was decided: queues,
groups, steps and their order, refusals. Preemption and sharing: `test_preemption.py` and
`test_prefix_reuse.py`."""

import random

import pytest
from scenario_help import Scenario, make_request, new_ids

from engine_core.scheduler import (
    DuplicateRequestId,
    ModelRunnerOutput,
    RequestStatus,
    StepOrderError,
)
from protocol.outputs import FinishReason

# ---------------------------------------------------------------------- groups are units


def test_each_of_n_sequences_counts_against_max_num_seqs_from_admission_on():
    """Before they exist. Proves S004, S007, S057, S058, S061."""
    three = make_request("three", 10, num_sequences=3)
    scenario = Scenario(three, make_request("two", 10, num_sequences=2), max_num_seqs=4)
    plan = scenario.plan()
    assert plan.batch.req_ids == ["three"]
    assert scenario.counts == (1, 1)
    scenario.add(make_request("one", 10))
    scenario.update_with_array(plan)
    # "two" stands in front of "one" and does not fit: none passes it
    assert scenario.plan().batch.req_ids == ["three", "three#1", "three#2"]


def test_a_place_is_free_again_as_each_of_n_sequences_ends():
    """Proves S007, S103."""
    two = make_request("two", 10, num_sequences=2, eos_token_ids=[9], temperature=0.0)
    scenario = Scenario(two, make_request("one", 10), max_num_seqs=2)
    scenario.update_with_array(scenario.plan())
    plan = scenario.plan()
    assert plan.batch.req_ids == ["two", "two#1"]
    output = ModelRunnerOutput(req_ids=plan.batch.req_ids, sampled_token_ids=[[9], [7]])
    scenario.take(plan, output)
    assert two.num_running_sequences == 1
    assert scenario.plan().batch.req_ids == ["two#1", "one"]


def test_a_request_of_more_sequences_than_places_is_never_admitted_in_part():
    """It ends at once with both numbers. Proves S005, S011."""
    scenario = Scenario(make_request("r", 10, num_sequences=5), max_num_seqs=4)
    plan = scenario.step()
    assert plan.batch.req_ids == []
    assert scenario.outputs["r"].finish_reason is FinishReason.LENGTH
    assert "num_sequences is 5, the limit is 4" in scenario.outputs["r"].detail


def test_the_blocks_of_all_n_sequences_are_wanted_before_one_runs():
    """Twelve tokens are three blocks, and each further sample takes one of its own at once. Three
    other blocks are held, so that the parent alone would fit. Proves S005, S135."""
    scenario = Scenario(make_request("held", 10, max_tokens=2), num_blocks=8, block_size=4)
    scenario.step()
    scenario.add(make_request("r", 12, num_sequences=4))
    assert scenario.plan().batch.req_ids == ["held"]
    assert scenario.counts == (1, 1)


def test_all_sequences_run_in_a_step_or_none():
    """Two are left of the budget of five, then of six three. Proves S005."""
    for budget, names in ((5, {"a", "b", "c"}), (6, {"a", "b", "c", "r", "r#1", "r#2"})):
        others = [make_request(name, 2) for name in "abc"]
        scenario = Scenario(
            *others, make_request("r", 2, num_sequences=3), max_num_batched_tokens=8
        )
        scenario.update_with_array(scenario.plan())
        scenario.scheduler.feedback.choose_budget = lambda now, budget=budget: budget
        assert set(scenario.plan().batch.req_ids) == names


# ---------------------------------------------------------------------- what a step is made of


def test_mixed_is_the_default_batching():
    """A prompt and a decode share a step. Proves S072, S074."""
    scenario = Scenario(make_request("old", 10), max_num_batched_tokens=16)
    scenario.step()
    scenario.add(make_request("new", 40))
    # running ones first; the prompt is chunked
    assert list(scenario.plan().num_scheduled_tokens.items()) == [("old", 1), ("new", 15)]


@pytest.mark.parametrize(
    ("batching", "chunks"),
    [("mixed", [6, 15, 15, 14]), ("prefill-first", [0, 16, 16, 16, 2])],
)
def test_tokens_of_a_running_request_beyond_the_budget_are_left_to_later_steps(batching, chunks):
    """A budget that is too small never stops scheduling. Proves S087, S101."""
    scenario = Scenario(
        make_request("a", 10),
        make_request("b", 50),
        max_num_batched_tokens=16,
        batching=batching,
    )
    assert [scenario.step().num_scheduled_tokens.get("b", 0) for _ in chunks] == chunks
    assert not scenario.requests["b"].sequences[0].is_prefill


def test_drafts_get_what_all_other_tokens_of_the_step_leave():
    """Behind the plain tokens of later requests, of a running prompt that is clipped, and of a new
    one. Proves S087, S101, S220."""
    scenario = Scenario(make_request("a", 4), make_request("b", 3), max_num_batched_tokens=8)
    scenario.step()
    scenario.draft(a=[7] * 7, b=[7])
    plan = scenario.step(a=[7] * 7, b=[7])
    assert plan.num_scheduled_tokens == {"a": 7, "b": 1}
    assert plan.scheduled_spec_decode_tokens == {"a": [7] * 6}
    scenario.draft(a=[7] * 7, b=[7])
    scenario.add(make_request("c", 10))
    assert scenario.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 6}
    scenario.draft(a=[7], b=[7, 7])
    plan = scenario.step(a=[7], b=[7])
    assert plan.num_scheduled_tokens == {"a": 2, "b": 2, "c": 4}
    assert plan.total_num_scheduled_tokens == 8


def test_the_drafts_of_one_sample_leave_the_other_samples_their_tokens():
    """Proves S005, S220."""
    request = make_request("r", 3, num_sequences=3, temperature=1.0, seed=1)
    scenario = Scenario(request, max_num_batched_tokens=5)
    for _ in range(2):
        scenario.update_with_array(scenario.plan())
    scenario.draft(**{"r": [7] * 7, "r#1": [7] * 7})
    plan = scenario.plan()
    assert plan.num_scheduled_tokens == {"r": 3, "r#1": 1, "r#2": 1}
    assert plan.scheduled_spec_decode_tokens == {"r": [7, 7]}


def test_a_sample_that_is_recomputed_leaves_the_samples_behind_it_a_token_each():
    """Also where requests are scheduled one by one, as they are when blocks are short. Proves
    S005."""
    scenario = Scenario(
        make_request("r", 4, num_sequences=3, priority=1),
        scheduling_policy="priority",
        max_num_seqs=3,
        max_num_batched_tokens=8,
    )
    for _ in range(10):
        scenario.update_with_array(scenario.plan())
    scenario.add(make_request("high", 4, max_tokens=1))
    scenario.scheduler.batching._running._allocate_at = lambda *_: 0
    plan = scenario.plan()
    assert plan.preempted_req_ids == ["r", "r#1", "r#2"]
    while len(plan.batch.req_ids) < 3:
        scenario.update_with_array(plan)
        plan = scenario.plan()
    assert plan.num_scheduled_tokens == {"r": 1, "r#1": 6, "r#2": 1}


def test_a_block_for_a_token_and_one_for_its_drafts_are_both_told_to_the_runner():
    """The token opens a block, its drafts the next one. Proves S220."""
    scenario = Scenario(make_request("a", 4), block_size=4)
    scenario.step()
    scenario.draft(a=[7] * 5)
    (update,) = scenario.plan().block_updates
    table = scenario.kv_cache.block_ids(scenario.requests["a"].sequences[0])[0]
    assert (len(table), update.start, update.block_ids) == (3, 1, (table[1:],))


def test_tokens_count_as_computed_from_the_schedule_on_and_not_from_the_update():
    """So that the next step could be planned while this one runs. Proves S069, S074."""
    request = make_request("a", 10)
    scenario = Scenario(request, max_num_batched_tokens=6)
    plan = scenario.plan()
    assert plan.batch.num_computed_tokens.tolist() == [0]
    assert request.num_computed_tokens == 6
    scenario.update(plan)
    assert request.num_computed_tokens == 6
    plan = scenario.plan()
    assert request.num_computed_tokens == 10
    scenario.update(plan)
    assert (request.num_computed_tokens, request.num_tokens) == (10, 11)


# ---------------------------------------------------------------------- what is refused


def test_the_id_of_an_unfinished_request_is_refused_and_that_request_goes_on():
    """Waiting, running, and finished before its last output is handed out. Proves S016, S041,
    S211."""
    first = make_request("a", 10, client_index=1, max_tokens=2)
    scenario = Scenario(first)
    for _ in range(2):
        with pytest.raises(DuplicateRequestId, match="'a'"):
            scenario.scheduler.add_request(make_request("a", 4, client_index=2))
        assert scenario.counts in ((0, 1), (1, 0))
        scenario.step()
    assert first.output_token_ids == [7, 7]
    scenario.add(make_request("a", 4))  # free again once its last output was handed out


def test_a_step_is_updated_once_and_in_order():
    """Nothing of the second update arrives. Proves S212, S213."""
    request = make_request("a", 10)
    scenario = Scenario(request)
    first = scenario.plan()
    with pytest.raises(StepOrderError, match="step 0"):
        scenario.scheduler.schedule()
    scenario.update(first)
    with pytest.raises(StepOrderError, match="step 0 is not to be updated, none is in flight"):
        scenario.update(first)
    second = scenario.plan()
    with pytest.raises(StepOrderError, match="step 1 is next"):
        scenario.update(first)
    assert request.output_token_ids == [7]
    scenario.update(second)
    assert request.output_token_ids == [7, 7]


@pytest.mark.parametrize("batching", ["mixed", "prefill-first"])
@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        (4096, {}, "4096 tokens, the limit is 4095"),
        (100, {"num_blocks": 6}, "need 7 KV blocks"),
        (100, {"num_blocks": 7, "watermark": 0.2}, "less 1 as head-room"),
    ],
)
def test_what_can_never_fit_ends_with_one_terminal_output_that_says_why(
    prompt, settings, words, batching
):
    """And no request behind it waits. Proves S011, S081, S134."""
    scenario = Scenario(
        make_request("big", prompt),
        make_request("small", 4, max_tokens=2),
        batching=batching,
        **settings,
    )
    assert scenario.requests["big"].status is RequestStatus.FINISHED_IGNORED
    ended = []
    for _ in range(3):
        scenario.step()
        ended += [output for output in scenario.outputs.values() if output.finished]
    assert [output.request_id for output in ended] == ["big", "small"]
    assert ended[0].finish_reason is FinishReason.LENGTH
    assert words in ended[0].detail
    assert ended[0].new_token_ids == []


# ---------------------------------------------------------------------- between clients


def test_by_default_one_clients_burst_does_not_keep_another_client_waiting():
    """A client that names no tenant is one. The next free place is the other client's, and no
    running request gives way for it."""
    burst = [make_request(f"b{index}", 8, max_tokens=4 + index) for index in range(50)]
    scenario = Scenario(*burst, max_num_seqs=4)
    scenario.step()
    scenario.add(make_request("other", 4, client_index=1, max_tokens=2))
    while not burst[0].is_finished:
        assert new_ids(scenario.step()) == []
    assert new_ids(scenario.step()) == ["other"]
    assert not any(request.account.num_preemptions for request in burst)
    # by name the order of arrival
    scenario = Scenario(
        *[make_request(f"b{index}", 8, max_tokens=1) for index in range(9)],
        make_request("other", 4, client_index=1),
        max_num_seqs=4,
        scheduling_policy="fcfs",
    )
    assert [new_ids(scenario.step())[-1] for _ in range(3)] == ["b3", "b7", "other"]


@pytest.mark.parametrize("seed", range(8))
def test_with_one_client_the_default_is_first_come_first_served_to_the_step(seed):
    """Random requests, aborts, preemptions of both kinds: equal plans. Proves S077."""
    plans: dict[str, list[str]] = {}
    for policy in ("fair", "fcfs"):
        draw = random.Random(seed)
        scenario = Scenario(
            scheduling_policy=policy,
            num_blocks=16,
            block_size=4,
            num_host_blocks=draw.choice([0, 40]),
            preemption_mode=draw.choice(["default", "swap"]),
            max_num_batched_tokens=draw.choice([20, 64]),
            max_num_seqs=5,
        )
        for index in range(60):
            for _ in range(draw.randint(0, 2)):
                name = f"r{len(scenario.requests)}"
                num_sequences, length = draw.choice([1, 1, 2]), draw.randint(1, 30)
                prompt = [draw.randint(1, 3) for _ in range(length)]
                most = draw.randint(1, 30)
                scenario.add(
                    make_request(name, prompt, max_tokens=most, num_sequences=num_sequences)
                )
            plan = scenario.plan()
            plans.setdefault(policy, []).append(repr(plan))
            scenario.update_with_array(plan)
            if index % 7 == 6:
                scenario.abort(f"r{draw.randrange(len(scenario.requests))}")
        assert scenario.scheduler.statistics().num_preemptions > 0
    assert plans["fair"] == plans["fcfs"]


# ---------------------------------------------------------------------- who waits
