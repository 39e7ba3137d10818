"""A request's stages, each reported once, in its last output and in no other."""

import logging
import types

from engine_core.observers.base import RequestLog, RequestTimes
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs, FinishReason
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

REQUEST = EngineRequest(
    request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=4)
)


def plan(new=(), preempted=()):
    return types.SimpleNamespace(
        scheduled_new_reqs=[types.SimpleNamespace(req_id=req_id) for req_id in new],
        preempted_req_ids=list(preempted),
    )


def token(request_id, index=0):
    return EngineCoreOutput(request_id=request_id, new_token_ids=[1], index=index)


def end(request_id, index=0):
    return EngineCoreOutput(
        request_id=request_id, new_token_ids=[1], index=index, finish_reason=FinishReason.LENGTH
    )


def test_stages_are_seconds_since_arrival():
    """Queued, scheduled, preempted. Proves S034."""
    times = RequestTimes()
    times.on_arrival(REQUEST, 0, 10.0)
    times.on_plan(plan(new=["r"]), 12.0)
    times.on_outputs({0: EngineCoreOutputs(other_outputs=[token("r")])}, 13.0)
    times.on_plan(plan(new=["r"], preempted=["r"]), 14.0)
    last = EngineCoreOutputs(other_outputs=[end("r")], finished_req_ids=["r"])
    times.on_outputs({0: last}, 20.0)
    [output] = last.other_outputs
    timings = output.timings
    assert (timings.first_scheduled_s, timings.first_token_s, timings.finished_s) == (
        2.0,
        3.0,
        10.0,
    )
    assert timings.num_preemptions == 1
    assert (times.num_first_tokens, times.queue_s, times.ttft_s) == (1, 2.0, 3.0)


def test_only_the_last_output_of_the_last_sequence_carries_them():
    times = RequestTimes()
    times.on_arrival(REQUEST, 0, 0.0)
    first = EngineCoreOutputs(other_outputs=[end("r", 1)])
    times.on_outputs({0: first}, 1.0)
    last = EngineCoreOutputs(other_outputs=[end("r", 0), end("r", 2)], finished_req_ids=["r"])
    times.on_outputs({0: last}, 2.0)
    assert [output.timings is None for output in first.other_outputs + last.other_outputs] == [
        True, True, False,
    ]  # fmt: skip


def test_a_request_preempted_with_all_its_sequences_counts_once():
    times = RequestTimes()
    times.on_arrival(REQUEST, 0, 0.0)
    times.on_plan(plan(preempted=["r", "r#1", "r#2", "stranger"]), 1.0)
    times.on_plan(plan(preempted=["r#1", "r#2"]), 2.0)  # the first one has ended
    last = EngineCoreOutputs(other_outputs=[end("r", 2)], finished_req_ids=["r"])
    times.on_outputs({0: last}, 3.0)
    assert last.other_outputs[0].timings.num_preemptions == 2


def test_columns_are_not_looked_at_and_unknown_requests_are_left_alone():
    columns = DecodedTokens(request_ids=["r"], token_ids=b"not even numbers")
    outputs = EngineCoreOutputs(
        other_outputs=[end("stranger")], finished_req_ids=["stranger"], decoded=columns
    )
    RequestTimes().on_outputs({0: outputs}, 1.0)
    assert outputs.other_outputs == [end("stranger")]


def test_an_end_without_a_token_has_no_first_token():
    times = RequestTimes()
    times.on_arrival(REQUEST, 0, 0.0)
    output = EngineCoreOutput(
        request_id="r", new_token_ids=[], finish_reason=FinishReason.ABORT, detail="stopping"
    )
    outputs = EngineCoreOutputs(other_outputs=[output], finished_req_ids=["r"])
    times.on_outputs({0: outputs}, 5.0)
    assert outputs.other_outputs[0].timings.first_token_s is None
    assert outputs.other_outputs[0].detail == "stopping"


def test_the_log_has_a_request_s_id_when_it_comes_is_aborted_and_ends(caplog):
    caplog.set_level(logging.DEBUG)
    log = RequestLog()
    log.on_arrival(REQUEST, 3, 0.0)
    log.on_abort({"r"}, 1.0)
    log.on_outputs({3: EngineCoreOutputs(other_outputs=[], finished_req_ids=["r"])}, 2.0)
    assert [each.getMessage() for each in caplog.records] == [
        "request 'r' of client 3: 1 tokens",
        "aborted: ['r']",
        "request 'r' has ended",
    ]
