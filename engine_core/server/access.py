"""What a client may do, and whose its requests are: by its key, or by the socket that it uses."""

from collections.abc import Callable

from msgspec.structs import replace

from engine_core.errors import RequestRefused
from engine_core.server.clients import Client
from protocol.block_hashes import isolated_salt
from protocol.calls import (
    ADMIN_CALLS,
    EngineStatistics,
    GetRequestInfo,
    GetRequests,
    ListRequests,
    RequestInfos,
    SchedulerSnapshot,
    WatchCache,
)
from protocol.errors import ErrorCode
from protocol.explanations import LookupEnd, RequestInfo
from protocol.outputs import CallFailed, CallResult
from protocol.requests import Call, EngineRequest


def owned_request(client: Client, message: EngineRequest, *, isolates: bool) -> EngineRequest:
    """The request under the tenant that it counts for. With `isolates`, under a cache salt that no
    other tenant has; a client without key and tenant is a tenant of its own.
    Raises RequestRefused: it names the tenant of another key."""
    rights, tenant, salt = client.rights, message.tenant, message.cache_salt
    if rights.key_name is not None:
        is_own = tenant is None or tenant.partition("/")[0] == rights.key_name
        if not is_own and not rights.is_admin:
            raise RequestRefused(
                ErrorCode.PERMISSION_DENIED,
                f"tenant is {tenant!r}, and this client's key is {rights.key_name!r}; omit it, or "
                "use an admin's key",
            )
        tenant = tenant or rights.key_name
    if isolates:
        salt = isolated_salt(client.nonce, tenant, salt)
    if (tenant, salt) == (message.tenant, message.cache_salt):
        return message
    return replace(message, tenant=tenant, cache_salt=salt)


def permitted_answer(
    client: Client, call: Call, answer: Callable[[Call], CallResult | CallFailed | None]
) -> CallResult | CallFailed | None:
    """`answer(call)`, or as much of it as this client may see. None: the answer comes later."""
    if client.rights.is_admin:
        return answer(call)
    name = client.rights.key_name
    if isinstance(call.call, GetRequests) and name is not None:
        call = replace(call, call=GetRequests(tenant=name))
    elif isinstance(call.call, (*ADMIN_CALLS, ListRequests, GetRequests, WatchCache)):
        return _denied(call, type(call.call).__name__)
    answered = answer(call)
    return None if answered is None else permitted_part(client, call, answered)


def permitted_part(
    client: Client, call: Call, answered: CallResult | CallFailed
) -> CallResult | CallFailed:
    """The part of an answer that this client may see."""
    if client.rights.is_admin:
        return answered
    result = answered.result if isinstance(answered, CallResult) else None
    name = client.rights.key_name
    if isinstance(call.call, GetRequestInfo):
        # an unknown one is denied too: whether others have such a request is theirs
        is_own = call.call.request_id in client.request_ids
        if isinstance(result, RequestInfo):
            is_own = is_own or (
                name is not None and (result.tenant or "").partition("/")[0] == name
            )
            result = _without_others(result)
        if not is_own or result is None:
            return _denied(call, f"GetRequestInfo({call.call.request_id!r:.100})")
    elif isinstance(result, RequestInfos):
        result = replace(result, requests=[_without_others(each) for each in result.requests])
    elif isinstance(result, EngineStatistics):
        result = _without_service(result, name)
    elif isinstance(result, SchedulerSnapshot):
        result = SchedulerSnapshot(
            statistics=_without_service(result.statistics, name),
            view=result.view.of_owner(
                lambda request: (
                    request.request_id in client.request_ids
                    or (name is not None and (request.tenant or "").partition("/")[0] == name)
                )
            ),
        )
    return answered if result is None else CallResult(call_id=call.call_id, result=result)


def _without_service(statistics: EngineStatistics, name: str | None) -> EngineStatistics:
    served = statistics.service_by_tenant
    return replace(
        statistics, service_by_tenant={key: served[key] for key in served if key == name}
    )


def _without_others(info: RequestInfo) -> RequestInfo:
    """Without tokens; and that the same ones are cached for another tenant is not said."""
    info, lookup = replace(info, prompt_change=None), info.cache_lookup
    if lookup is None or lookup.ended is not LookupEnd.OTHER_SALT_OR_ADAPTER:
        return info
    return replace(info, cache_lookup=replace(lookup, ended=LookupEnd.NEVER_SEEN))


def _denied(call: Call, what: str) -> CallFailed:
    return CallFailed(
        call_id=call.call_id,
        code=ErrorCode.PERMISSION_DENIED,
        message=f"{what} is not for this client: over TCP it needs an admin's key, and of requests "
        "only its own are shown; use one made by `engine-core keys add NAME --admin`, or the "
        "engine's Unix socket",
    )
