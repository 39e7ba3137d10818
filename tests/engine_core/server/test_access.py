"""What a client may do by its key, and under whose name its requests run."""

import msgspec
import pytest

from engine_core.errors import RequestRefused
from engine_core.server.access import owned_request, permitted_answer
from engine_core.server.clients import Client, Rights
from protocol.calls import (
    ADMIN_CALLS,
    EngineStatistics,
    GetRequestInfo,
    GetRequests,
    GetStatistics,
    ListRequests,
    Ping,
    Pong,
    RequestInfos,
    RequestList,
    WatchCache,
)
from protocol.errors import ErrorCode
from protocol.explanations import CacheLookup, LookupEnd, PromptChange, RequestInfo
from protocol.outputs import CallFailed, CallResult
from protocol.requests import Call, EngineRequest
from protocol.sampling import SamplingParams

ALICE = Rights("alice", is_admin=False)
NO_KEY = Rights(None, is_admin=False)


def client(rights, *request_ids):
    return Client(3, b"id", "test", rights, request_ids=set(request_ids))


def request(**fields):
    return EngineRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1), **fields
    )


def refuse(_call):
    raise AssertionError("it must not reach the engine")


def answered(result):
    return lambda call: CallResult(call_id=call.call_id, result=result)


def info(request_id, tenant=None, ended=LookupEnd.OTHER_SALT_OR_ADAPTER):
    return RequestInfo(
        request_id=request_id,
        status="finished",
        priority=0,
        tenant=tenant,
        num_sequences=1,
        num_prompt_tokens=1,
        num_output_tokens=1,
        max_tokens=1,
        num_computed_tokens=1,
        cache_lookup=CacheLookup(num_tokens=0, num_host_tokens=0, num_disk_tokens=0, ended=ended),
        prompt_change=PromptChange(position=0, num_same=64, before=[], was=[1], now=[2]),
    )


@pytest.mark.parametrize(
    ("kind", "rights"),
    [
        *(
            (kind, rights)
            for kind in (*ADMIN_CALLS, ListRequests, WatchCache)
            for rights in (ALICE, NO_KEY)
        ),
        (GetRequests, NO_KEY),
    ],
)
def test_calls_of_operators_need_an_admins_key_and_do_nothing_without(kind, rights):
    given = {field.name: 1 for field in msgspec.structs.fields(kind) if field.required}
    call = Call(call_id=7, call=kind(**given))
    failed = permitted_answer(client(rights), call, refuse)
    assert failed.call_id == 7
    assert failed.code is ErrorCode.PERMISSION_DENIED
    assert kind.__name__ in failed.message and "engine-core keys add NAME --admin" in failed.message
    result = RequestList(request_ids=["a"])
    assert permitted_answer(client(Rights()), call, answered(result)).result is result


def test_anyone_may_ping():
    pong = Pong(uptime_s=1.0, step_id=1, progress_age_s=0.0)
    call = Call(call_id=1, call=Ping())
    assert permitted_answer(client(NO_KEY), call, answered(pong)).result == pong


@pytest.mark.parametrize(
    ("rights", "request_id", "tenant", "is_shown"),
    [
        (ALICE, "mine", "alice", True),
        (ALICE, "my finished one", "alice", True),
        (ALICE, "my user's", "alice/ann", True),
        (ALICE, "bob's", "bob", False),
        (ALICE, "another's", "alice2", False),
        (ALICE, "of no tenant", None, False),
        (NO_KEY, "mine", None, True),
        (NO_KEY, "of no tenant", None, False),
        (Rights("root", is_admin=True), "bob's", "bob", True),
    ],
)
def test_of_requests_only_the_own_ones_are_shown(rights, request_id, tenant, is_shown):
    call = Call(call_id=1, call=GetRequestInfo(request_id=request_id))
    answer = permitted_answer(client(rights, "mine"), call, answered(info(request_id, tenant)))
    if is_shown:
        assert answer.result.request_id == request_id
    else:
        assert answer.code is ErrorCode.PERMISSION_DENIED
        unknown = CallFailed(call_id=1, code=ErrorCode.UNKNOWN_REQUEST, message="unknown")
        assert permitted_answer(client(rights), call, lambda _: unknown) == answer


@pytest.mark.parametrize("asked", [None, "bob", "alice"])
def test_of_all_requests_a_key_sees_those_of_its_tenant_whatever_it_asks_for(asked):
    def answer(call):
        asked_for.append(call.call.tenant)
        return answered(RequestInfos(requests=[info("x", "alice")], num_unfinished=1))(call)

    asked_for = []
    call = Call(call_id=3, call=GetRequests(tenant=asked))
    given = permitted_answer(client(ALICE), call, answer)
    assert (given.call_id, given.result.requests[0].cache_lookup.ended) == (3, LookupEnd.NEVER_SEEN)
    permitted_answer(client(Rights()), call, answer)
    assert asked_for == ["alice", asked]


def test_an_explanation_does_not_tell_what_others_have_cached():
    call = Call(call_id=1, call=GetRequestInfo(request_id="mine"))
    for rights, ended in ((ALICE, LookupEnd.NEVER_SEEN), (Rights(), "other salt or adapter")):
        answer = permitted_answer(client(rights, "mine"), call, answered(info("mine", "alice")))
        assert answer.result.cache_lookup.ended == ended
        assert (answer.result.prompt_change is None) == (rights is ALICE), "nor any tokens"


def test_statistics_name_the_own_tenant_only():
    number = dict.fromkeys(EngineStatistics.__struct_fields__, 0)
    statistics = EngineStatistics(
        **number | {"num_finished": {}, "service_by_tenant": {"alice": 1.0, "bob": 2.0}}
    )
    call = Call(call_id=1, call=GetStatistics())
    for rights, shown in ((ALICE, {"alice"}), (NO_KEY, set()), (Rights(), {"alice", "bob"})):
        answer = permitted_answer(client(rights), call, answered(statistics))
        assert set(answer.result.service_by_tenant) == shown


def test_a_request_counts_for_the_tenant_of_its_key():
    def tenant(rights, asked):
        return owned_request(client(rights), request(tenant=asked), isolates=False).tenant

    assert tenant(ALICE, None) == tenant(ALICE, "alice") == "alice"
    for other in ("bob", "alice2", "alic", "Alice", "", "/alice", " alice"):
        with pytest.raises(RequestRefused, match=rf"'{other}'.*key is 'alice'") as refused:
            tenant(ALICE, other)
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
    assert tenant(ALICE, "alice/ann") == "alice/ann", "a user of the key"
    assert tenant(Rights("gateway", is_admin=True), "bob") == "bob"
    assert tenant(Rights("gateway", is_admin=True), None) == "gateway"
    assert tenant(NO_KEY, "bob") == "bob", "without keys a tenant is the client's word"
    assert tenant(NO_KEY, None) is None


def test_isolated_tenants_never_share_a_salt():
    alone, other = client(Rights()), client(Rights())

    def salt(of, **fields):
        return owned_request(of, request(**fields), isolates=True).cache_salt

    salts = [
        salt(who, tenant=tenant, cache_salt=cache_salt)
        for who in (alone, other)
        for tenant in (None, "a", "None", "a', 's")
        for cache_salt in (None, "s", "None", alone.nonce)
    ]
    # tenants with a name are the same through whichever client
    assert len(set(salts)) == 4 * 5
    assert salt(alone) == salt(alone), "a tenant shares with itself"
    assert salt(alone, cache_salt=salt(other)) not in salts
    plain = request(cache_salt="s")
    assert owned_request(alone, plain, isolates=False) is plain
