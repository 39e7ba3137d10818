"""Typed calls: each has one answer, and nothing else can be called."""

import pytest

from engine_core.server.calls import answer_call
from protocol import calls
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo
from protocol.outputs import CallFailed, CallResult
from protocol.requests import Call

KNOWN = RequestInfo(
    request_id="known", status="running", priority=0, tenant=None, num_sequences=1,
    num_prompt_tokens=3, num_output_tokens=1, num_computed_tokens=3,
)  # fmt: skip


class Engine:
    uptime_s = 1.5

    def reset_prefix_cache(self):
        return 7

    def drain(self, why):
        return 2

    def explain(self, request_id):
        return KNOWN if request_id == "known" else None

    def live_request_ids(self):
        return ["known"]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (calls.Ping(), calls.Pong(uptime_s=1.5)),
        (calls.ResetPrefixCache(), calls.PrefixCacheReset(num_blocks_evicted=7)),
        (calls.Drain(), calls.Draining(num_requests_left=2)),
        (calls.GetRequestInfo(request_id="known"), KNOWN),
        (calls.ListRequests(), calls.RequestList(request_ids=["known"])),
    ],
)
def test_each_call_is_answered_under_its_number(call, result):
    assert answer_call(Call(call_id=9, call=call), Engine()) == CallResult(call_id=9, result=result)


def test_a_request_that_nobody_knows_is_a_failed_call():
    call = Call(call_id=9, call=calls.GetRequestInfo(request_id="who"))
    answer = answer_call(call, Engine())
    assert isinstance(answer, CallFailed)
    assert (answer.call_id, answer.code) == (9, ErrorCode.UNKNOWN_REQUEST)
    assert "'who' is unknown" in answer.message
