"""What comes of a step: outputs, aborts, faults, drafts, numbers."""

import pytest
from driving import Drive, make_request, make_scheduler

from engine_core.scheduler import DraftTokenIds, ModelRunnerOutput, RequestStatus
from protocol.outputs import FinishReason
from tests.protocol.all_outputs import all_outputs

EMPTY = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])


def test_each_client_gets_only_its_own_outputs():
    """Proves S017, S213, S227, S231."""
    scheduler = make_scheduler()
    drive = Drive(
        scheduler,
        make_request("a", 2, client_index=4),
        make_request("b", 2, client_index=9, max_tokens=1),
        make_request("c", 2, client_index=4),
    )
    plan = scheduler.schedule()
    outputs = scheduler.update_from_output(
        plan, ModelRunnerOutput(req_ids=["c", "b", "a"], sampled_token_ids=[[3], [2], [1]])
    )
    token_ids = {
        index: [(output.request_id, output.new_token_ids) for output in all_outputs(per_client)]
        for index, per_client in outputs.items()
    }
    assert token_ids == {4: [("a", [1]), ("c", [3])], 9: [("b", [2])]}
    assert outputs[4].finished_req_ids == []
    assert outputs[9].finished_req_ids == ["b"]
    assert drive.step().finished_req_ids == ["b"]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_finish_requests_gives_back_every_block_and_one_terminal_output(num_steps):
    """Waiting, prefilling, decoding. Proves S050, S172, S179, S214."""
    drive = Drive(make_scheduler(budget=4), make_request("a", 7))
    for _ in range(num_steps):
        drive.step()
    for _ in range(2):
        drive.scheduler.finish_requests(["a", "b"], RequestStatus.FINISHED_ABORTED, "enough")
    assert drive.scheduler.statistics().num_blocks_in_use == 0
    assert drive.scheduler.has_work()
    assert drive.step().finished_req_ids == ["a"]
    (output,) = drive.outputs
    assert (output.finish_reason, output.detail) == (FinishReason.ABORT, "enough")
    assert not drive.scheduler.has_work()
    assert drive.step().finished_req_ids == []
    assert drive.outputs == []


def test_only_final_states_finish_a_request():
    with pytest.raises(ValueError, match="RUNNING"):
        make_scheduler().finish_requests("a", RequestStatus.RUNNING)


def test_a_step_whose_requests_have_all_ended_does_not_block_the_next():
    drive = Drive(make_scheduler(), make_request("a", 3))
    drive.scheduler.schedule()
    drive.scheduler.finish_requests("a", RequestStatus.FINISHED_ERROR, "gone")
    drive.step()
    assert [output.detail for output in drive.outputs] == ["gone"]


def test_a_request_of_a_discarded_step_goes_on_with_the_blocks_that_earlier_steps_filled():
    """The first step's two blocks are good, the second step's one is not."""
    prompt = list(range(10, 22))
    drive = Drive(make_scheduler(budget=8), make_request("a", prompt))
    drive.step()
    plan = drive.scheduler.schedule()
    drive.add(make_request("waits", prompt))
    drive.scheduler.discard_step(plan, "the device is gone")
    drive.scheduler.update_from_output(plan, EMPTY)
    assert drive.step().total_num_scheduled_tokens == 0, "the runner drops the rows first"
    (resumed,) = drive.step().resumed_reqs
    assert (resumed.req_id, resumed.num_computed_tokens) == ("a", 8)
    (new,) = drive.step().scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens) == ("waits", 8), "the block is a's own"


def test_a_failed_request_ends_alone_and_its_blocks_are_not_found():
    prompt = list(range(10, 22))
    drive = Drive(make_scheduler(), make_request("a", prompt), make_request("b", 3))
    plan = drive.scheduler.schedule()
    outputs = drive.scheduler.update_from_output(
        plan,
        ModelRunnerOutput(
            req_ids=["a", "b"], sampled_token_ids=[[], [5]], failures={"a": "logits are NaN"}
        ),
    )
    assert [(o.request_id, o.finish_reason, o.detail) for o in all_outputs(outputs[0])] == [
        ("a", FinishReason.ERROR, "logits are NaN"),
        ("b", None, None),
    ]
    drive.add(make_request("c", [*prompt, 1]))
    assert drive.step().scheduled_new_reqs[0].num_computed_tokens == 0


def test_a_request_whose_parameters_leave_no_token_is_refused_alone():
    drive = Drive(make_scheduler(), make_request("a", 3), make_request("b", 3))
    outputs = drive.scheduler.update_from_output(
        drive.scheduler.schedule(),
        ModelRunnerOutput(
            req_ids=["a", "b"],
            sampled_token_ids=[[], [5]],
            failures={"a": "no token is possible"},
            refused={"a"},
        ),
    )
    assert [(o.request_id, o.finish_reason, o.detail) for o in all_outputs(outputs[0])] == [
        ("a", FinishReason.REFUSED, "no token is possible"),
        ("b", None, None),
    ]


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_result_of_the_wrong_length_ends_only_that_request(tokens):
    """Proves S232."""
    drive = Drive(make_scheduler(), make_request("a", 3), make_request("b", 3))
    drive.step(a=tokens)
    assert [(o.request_id, o.finish_reason) for o in drive.outputs] == [
        ("a", FinishReason.ERROR),
        ("b", None),
    ]
    assert f"returned {len(tokens)} tokens" in drive.outputs[0].detail


def test_drafts_never_exceed_the_budget_max_tokens_or_the_model():
    """Proves S032."""
    for limits, options, expected in [
        ({"budget": 3}, {}, [1, 2]),
        ({}, {"max_tokens": 3}, [1]),
        ({"max_model_len": 7}, {}, [1, 2]),
    ]:
        drive = Drive(make_scheduler(**limits), make_request("a", 3, **options))
        drive.step()
        drive.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3, 4, 5]]))
        plan = drive.step(a=[1, 2, 3][: len(expected) + 1])
        assert plan.scheduled_spec_decode_tokens == {"a": expected}


def test_drafts_preempt_no_request():
    drive = Drive(make_scheduler(num_blocks=2), make_request("a", 3), make_request("b", 2))
    drive.step()
    drive.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2]]))
    plan = drive.step()
    assert plan.preempted_req_ids == []
    assert plan.scheduled_spec_decode_tokens == {}
    assert plan.num_scheduled_tokens == {"a": 1, "b": 1}


def test_cached_prompt_tokens_are_reported_once_with_the_first_output():
    prompt = list(range(10, 23))
    drive = Drive(make_scheduler(), make_request("a", prompt), make_request("b", prompt))
    plan = drive.step()
    # requests that arrive together share: b reads in this step what a writes in it
    assert plan.num_scheduled_tokens == {"a": 13, "b": 1}
    assert [output.num_cached_tokens for output in drive.outputs] == [0, 12]
    drive.step()
    assert [output.num_cached_tokens for output in drive.outputs] == [None, None]


def test_cached_tokens_that_were_delivered_are_no_cached_prompt_tokens():
    """The prompt has six tokens; eight are found."""
    prompt = list(range(10, 16))
    drive = Drive(make_scheduler(), make_request("a", prompt, max_tokens=7))
    for _ in range(7):
        drive.step()
    drive.add(make_request("b", prompt, output_token_ids=[7] * 6))
    assert drive.step().scheduled_new_reqs[0].num_computed_tokens == 8
    assert drive.requests[1].account.num_cached_tokens == 6
    assert drive.scheduler.statistics().num_cached_prompt_tokens == 6


def test_statistics_add_up():
    prompt = list(range(10, 23))
    drive = Drive(make_scheduler(), *[make_request(n, prompt, max_tokens=2) for n in "ab"])
    drive.step()
    drive.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)
    drive.step()
    drive.step()
    numbers = drive.scheduler.statistics()
    assert (numbers.num_running, numbers.num_waiting, numbers.num_steps) == (0, 0, 2)
    assert (numbers.num_prompt_tokens, numbers.num_cached_prompt_tokens) == (26, 12)
    assert numbers.num_generated_tokens == 3
    assert (numbers.num_blocks_in_use, numbers.num_blocks_cached) == (0, 3)
    assert numbers.num_finished == {
        "stop": 0, "length": 1, "abort": 1, "error": 0, "timeout": 0, "refused": 0,
        "repetition": 0,
    }  # fmt: skip
    assert drive.scheduler.reset_prefix_cache() == 3
