"""Typed calls: each has one answer, and nothing else can be called."""

from types import SimpleNamespace

import pytest

from engine_core.core import EngineCore
from protocol import calls
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo
from protocol.outputs import CallFailed, CallResult
from protocol.requests import Call

KNOWN = RequestInfo(
    request_id="known", status="running", priority=0, tenant=None, num_sequences=1,
    num_prompt_tokens=3, num_output_tokens=1, max_tokens=5, num_computed_tokens=3,
)  # fmt: skip


@pytest.fixture
def core():
    """1.5 s old."""
    scheduler = SimpleNamespace(
        max_steps_in_flight=1,
        reset_prefix_cache=lambda: 7,
        get_request_counts=lambda: (1, 1),
        set_pause_state=lambda state, why: None,
        explain_all=lambda tenant: calls.RequestInfos(
            requests=[KNOWN] if tenant == "t" else [], num_unfinished=9
        ),
        explain=lambda request_id: KNOWN if request_id == "known" else None,
    )
    times = iter([0.0])
    return EngineCore(
        inbox=None,
        outbox=None,
        clients=[SimpleNamespace(request_ids={"known"})],
        scheduler=scheduler,
        executor=SimpleNamespace(max_steps_in_flight=1),
        lifecycle=SimpleNamespace(drain=lambda why: None),
        validator=None,
        eos_token_ids=(),
        clock=lambda: next(times, 1.5),
    )


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
def test_each_call_is_answered_under_its_number(core, call, result):
    assert core.answer_call(Call(call_id=9, call=call)) == CallResult(call_id=9, result=result)


def test_a_request_that_nobody_knows_is_a_failed_call(core):
    call = Call(call_id=9, call=calls.GetRequestInfo(request_id="who"))
    answer = core.answer_call(call)
    assert isinstance(answer, CallFailed)
    assert (answer.call_id, answer.code) == (9, ErrorCode.UNKNOWN_REQUEST)
    assert "'who' is unknown" in answer.message
