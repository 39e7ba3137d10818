"""GET /v1/requests: unfinished requests, and why each waits."""

import asyncio
import itertools
from collections.abc import Collection
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine_calls import Engine
from frontend.errors import CallRefused
from frontend.http.ask_engines import Resting, ask_engines
from frontend.http.event_stream import json_response
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel
from protocol.calls import MAX_LISTED_REQUESTS, RequestInfos
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo


class LiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`waits_for` and `why`, in words, are null unless it waits."""

    id: str
    model: str
    status: str
    tenant: str | None
    priority: int
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_requests_ahead: int | None
    waits_for: str | None
    why: str | None


class LiveRequests(msgspec.Struct, frozen=True, kw_only=True):
    """`num_unfinished` counts those that are too many to be listed, too; `unavailable` are engines
    that do not answer."""

    object: Literal["list"] = "list"
    data: list[LiveRequest]
    num_unfinished: int
    unavailable: dict[str, str]


@operation("GET", "/v1/requests", gives=LiveRequests)
async def list_requests(request: Request) -> Response:
    """Unfinished requests and why each waits: the caller's own, for an admin's key all."""
    caller = exchange_of(request)

    async def ask(model: ServedModel, engine: Engine) -> tuple[list[LiveRequest], int]:
        shown, num_unfinished = await visible_requests(engine, caller)
        return [_live_request(each, model) for each in shown], num_unfinished

    data: list[LiveRequest] = []
    num_unfinished, unavailable = 0, {}
    for of_model in await ask_engines(request, ask):
        for name, answer in of_model.items():
            if isinstance(answer, Exception):
                unavailable[name] = str(answer) or "it does not answer"
            elif not isinstance(answer, Resting):
                data += answer[0]
                num_unfinished += answer[1]
    body = LiveRequests(data=data, num_unfinished=num_unfinished, unavailable=unavailable)
    return json_response(body)


async def visible_requests(engine: Engine, caller: Exchange) -> tuple[list[RequestInfo], int]:
    """Unfinished ones that the caller may see, and the number of those that are not listed, too."""
    own = {
        wire_id
        for each in engine.session.requests.in_flight(engine.session)
        if caller.is_admin or caller.owns(each.wire.tenant)
        for wire_id in each.wire_ids
    }
    infos = await _infos(engine, own, None if caller.is_admin else caller.caller)
    shown = [each for each in infos.requests if caller.is_admin or each.request_id in own]
    return shown, infos.num_unfinished if caller.is_admin else len(own)


async def _infos(engine: Engine, own: Collection[str], tenant: str | None) -> RequestInfos:
    try:
        return await engine.request_infos(tenant)
    except CallRefused as error:
        if error.code is not ErrorCode.PERMISSION_DENIED:
            raise
    # over TCP without keys: an engine explains to a client its own requests only
    asked = [_info(engine, each) for each in itertools.islice(own, MAX_LISTED_REQUESTS)]
    found = [info for info in await asyncio.gather(*asked) if info is not None]
    return RequestInfos(requests=found, num_unfinished=len(own))


async def _info(engine: Engine, request_id: str) -> RequestInfo | None:
    try:
        return await engine.request_info(request_id)
    except CallRefused:  # it has just ended
        return None


def _live_request(info: RequestInfo, model: ServedModel) -> LiveRequest:
    names = info.__struct_fields__
    same = {name: getattr(info, name) for name in LiveRequest.__struct_fields__ if name in names}
    return LiveRequest(
        id=info.request_id,
        model=model.names[0],
        num_cached_tokens=None if info.cache_lookup is None else info.cache_lookup.num_tokens,
        num_preemptions=len(info.preemptions),
        **same,
    )
