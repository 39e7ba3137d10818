"""Typed calls: each has one answer, and nothing else can be called."""

from typing import get_args

import pytest
from test_core_loop import Served

from protocol import calls
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo
from protocol.outputs import CallFailed
from protocol.requests import Call

KNOWN = RequestInfo(
    request_id="known", status="running", priority=0, tenant=None, num_sequences=1,
    num_prompt_tokens=3, num_output_tokens=1, max_tokens=5, num_computed_tokens=3,
)  # fmt: skip


def answer_to(call):
    """What an engine answers that is 1.5 s old."""
    times, answers = iter([0.0]), []
    served = Served(1, [Call(call_id=9, call=call)], runs=False, clock=lambda: next(times, 1.5))
    served.client.request_ids.add("known")
    served.sent.post = lambda client, message: answers.append(message)
    scheduler = served.scheduler
    scheduler.reset_prefix_cache = lambda: 7
    scheduler.get_request_counts = lambda: (1, 1)
    scheduler.explain = lambda request_id: KNOWN if request_id == "known" else None
    scheduler.explain_all = lambda tenant: calls.RequestInfos(
        requests=[KNOWN] if tenant == "t" else [], num_unfinished=9
    )
    served.core.run()
    (answer,) = answers
    assert answer.call_id == 9
    return answer


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (calls.Ping(), calls.Pong(uptime_s=1.5, step_id=-1, progress_age_s=1.5)),
        (calls.ResetPrefixCache(), calls.PrefixCacheReset(num_blocks_evicted=7)),
        (calls.Drain(), calls.Draining(num_requests_left=2)),
        (calls.GetRequestInfo(request_id="known"), KNOWN),
        (calls.GetRequests(tenant="t"), calls.RequestInfos(requests=[KNOWN], num_unfinished=9)),
        (calls.ListRequests(), calls.RequestList(request_ids=["known"])),
    ],
)
def test_each_call_is_answered_under_its_number(call, result):
    assert answer_to(call).result == result


@pytest.mark.parametrize("call", get_args(calls.AnyCall))
def test_every_call_has_an_answer_in_every_engine(call):
    values = {"request_id": "x", "mode": "keep", "level": 1, "model": "m", "name": "a", "path": "p"}
    given = {name: values[name] for name in call.__struct_fields__ if name in values}
    answer = answer_to(call(**given))
    assert getattr(answer, "code", None) is not ErrorCode.INTERNAL


def test_a_request_that_nobody_knows_is_a_failed_call():
    answer = answer_to(calls.GetRequestInfo(request_id="who"))
    assert isinstance(answer, CallFailed)
    assert answer.code is ErrorCode.UNKNOWN_REQUEST
    assert "'who' is unknown" in answer.message


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (calls.LoadAdapter(name="a", path="a"), "this engine was started without adapters"),
        (calls.UnloadAdapter(name="a"), "this engine was started without adapters"),
        (calls.WatchCache(), "this model keeps nothing between steps"),
    ],
)
def test_a_call_of_a_part_that_the_engine_does_not_have_is_refused_by_name(call, why):
    answer = answer_to(call)
    assert answer.code is ErrorCode.NOT_SUPPORTED
    assert why in answer.message
