"""When a request ends, and what its last output says."""

import random
import struct

import pytest
from driving import Drive, make_request, make_scheduler
from scenario_help import Scenario
from scenario_help import make_request as scenario_request

from engine_core.scheduler import ModelRunnerOutput, RequestStatus, stop
from protocol.outputs import FinishReason, Logprobs
from protocol.sampling import RepetitionDetection
from tests.protocol.all_outputs import all_outputs


def only_output(request, tokens, **limits):
    drive = Drive(make_scheduler(**limits), request)
    for token in tokens:
        drive.step(**{request.request_id: [token]})
    return drive.outputs[0]


def test_end_of_sequence_stops_and_is_part_of_the_output():
    """Proves S024, S036."""
    output = only_output(make_request("a", 3, eos_token_ids=(2, 5)), [9, 5])
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None
    assert output.new_token_ids == [5]


def test_ignore_eos_goes_on_but_stop_tokens_still_stop():
    """Proves S035, S229."""
    request = make_request("a", 3, eos_token_ids=(2,), ignore_eos=True, stop_token_ids=(4, 2))
    assert only_output(request, [4]).stop_reason == 4
    request = make_request("a", 3, eos_token_ids=(2,), ignore_eos=True)
    assert only_output(request, [2]).finish_reason is None


def test_neither_stops_before_min_tokens():
    request = make_request("a", 3, eos_token_ids=(2,), stop_token_ids=(4,), min_tokens=3)
    assert only_output(request, [2, 4]).finish_reason is None
    request = make_request("a", 3, eos_token_ids=(2,), stop_token_ids=(4,), min_tokens=3)
    assert only_output(request, [2, 4, 4]).finish_reason is FinishReason.STOP


def test_max_tokens_and_max_model_len_end_with_length_and_a_stop_token_goes_before_them():
    """Proves S036, S037, S064."""
    assert only_output(make_request("a", 3, max_tokens=2), [9, 9]).finish_reason == "length"
    assert only_output(make_request("a", 3), [9, 9], max_model_len=5).finish_reason == "length"
    request = make_request("a", 3, max_tokens=1, eos_token_ids=(2,))
    assert only_output(request, [2]).finish_reason is FinishReason.STOP


def test_only_sequences_that_may_stop_are_looked_at_one_by_one(monkeypatch):
    """Of 20 running, in a step whose token stops none, one or some of them. Proves S230."""
    scenario = Scenario(
        *[
            scenario_request(f"r{n}", 5, eos_token_ids=(2,), stop_token_ids=(10 + n,))
            for n in range(20)
        ]
    )
    for _ in range(2):
        scenario.update_with_array(scenario.plan())
    seen = []

    def spy(sequence, max_model_len):
        seen.append(sequence.request.request_id)
        return check_stop(sequence, max_model_len)

    check_stop = stop.check_stop
    monkeypatch.setattr(stop, "check_stop", spy)
    for token_id, num_left in ((7, 20), (40, 20), (2, 0)):
        seen.clear()
        scenario.update_with_array(scenario.plan(), token_id)
        assert len(seen) == (20 if token_id == 2 else 0)
        assert scenario.counts == (num_left, 0)


def test_tokens_behind_the_stop_are_dropped_with_their_logprobs():
    """Proves S225."""
    drive = Drive(make_scheduler(), make_request("a", 3, stop_token_ids=(5,)))
    drive.step()
    request = drive.requests[0]
    request.sequences[0].spec_token_ids = [8, 5, 8]
    plan = drive.scheduler.schedule()
    columns = Logprobs(
        num_positions=4,
        width=2,
        token_ids=struct.pack("<8i", *range(8)),
        logprobs=struct.pack("<8f", *range(8)),
        ranks=[1, 2, 3, 4],
    )
    outputs = drive.scheduler.update_from_output(
        plan,
        ModelRunnerOutput(req_ids=["a"], sampled_token_ids=[[8, 5, 8, 6]], logprobs={"a": columns}),
    )
    (output,) = all_outputs(outputs[0])
    assert output.new_token_ids == [8, 5]
    assert output.logprobs.num_positions == 2
    assert struct.unpack("<4i", output.logprobs.token_ids) == (0, 1, 2, 3)
    assert struct.unpack("<4f", output.logprobs.logprobs) == (0, 1, 2, 3)
    assert output.logprobs.ranks == [1, 2]
    assert request.output_token_ids == [7, 8, 5]
    assert not drive.scheduler.get_request_counts()[0]


@pytest.mark.parametrize(
    ("delivered", "options", "reason"),
    [
        ([5], {"eos_token_ids": (5,)}, FinishReason.STOP),
        ([1, 4], {"stop_token_ids": (4,)}, FinishReason.STOP),
        ([1, 1, 1], {"max_tokens": 3}, FinishReason.LENGTH),
    ],
)
def test_a_resumed_request_that_was_over_already_ends_at_once(delivered, options, reason):
    drive = Drive(make_scheduler(), make_request("a", 3, output_token_ids=delivered, **options))
    assert drive.scheduler.has_work()
    plan = drive.step()
    assert plan.total_num_scheduled_tokens == 0
    (output,) = drive.outputs
    assert output.finish_reason is reason
    assert output.new_token_ids == []
    assert not drive.scheduler.has_work()


def test_delivered_tokens_are_computed_again_and_count_against_max_tokens():
    request = make_request("a", 3, output_token_ids=[8, 9], max_tokens=4)
    drive = Drive(make_scheduler(), request)
    (new,) = drive.step().scheduled_new_reqs
    assert new.output_token_ids == [8, 9]
    assert list(new.prompt_token_ids) == request.prompt_token_ids
    assert drive.outputs[0].new_token_ids == [7]
    drive.step()
    assert drive.outputs[0].finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [8, 9, 7, 7]
    assert request.status is RequestStatus.FINISHED_LENGTH


def repeats(tokens, detection):
    """As vLLM says it, token by token."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        if size * detection.min_count > len(tokens):
            return False
        ending = tokens[-size:]
        if all(
            tokens[-size * turn : -size * (turn - 1) or None] == ending
            for turn in range(1, detection.min_count + 1)
        ):
            return True
    return False


def test_a_sequence_ends_at_the_token_that_repeats_a_pattern_often_enough():
    """Random outputs of two tokens, with and without min_tokens, against the plain definition."""
    draw = random.Random(0)
    num_ended = 0
    for number in range(60):
        size = draw.randint(1, 5)
        detection = RepetitionDetection(
            max_pattern_size=size,
            min_pattern_size=draw.randint(1, size),
            min_count=draw.randint(2, 4),
        )
        min_tokens = draw.choice([0, 0, 9])
        request = make_request(
            f"r{number}", 3, max_tokens=30, min_tokens=min_tokens, repetition_detection=detection
        )
        drive, tokens = Drive(make_scheduler(), request), []
        for _ in range(14):
            tokens.append(draw.choice([8, 9, 9]))
            drive.step(**{request.request_id: [tokens[-1]]})
            (output,) = drive.outputs
            is_over = len(tokens) >= min_tokens and repeats(tokens, detection)
            assert output.finished == is_over
            if is_over:
                assert output.finish_reason is FinishReason.REPETITION
                assert output.stop_reason == "repetition_detected"
                num_ended += 1
                break
    assert 20 < num_ended < 60
