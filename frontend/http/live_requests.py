"""GET /v1/requests: unfinished requests, and why each waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.errors import CallRefused, EngineClientError
from frontend.http.caller import Caller
from frontend.http.event_stream import json_response
from frontend.http.health import engine_name
from frontend.http.operations import Operation
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.settings import ServerSettings
from protocol.errors import ErrorCode
from protocol.explanations import RequestInfo

_MAX_LISTED = 256
"""The engine explains each between two steps."""


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


async def list_requests(request: Request) -> Response:
    """Unfinished requests and why each waits: the caller's own, for an admin's key all."""
    models: ServedModels = request.app.state.models
    settings: ServerSettings = request.app.state.settings
    caller = Caller.of(request)
    found = await asyncio.gather(
        *(_of_engine(model, caller, settings.health_timeout) for model in models),
        return_exceptions=True,
    )
    data: list[LiveRequest] = []
    num_unfinished, unavailable = 0, {}
    for number, (model, each) in enumerate(zip(models, found, strict=True)):
        if isinstance(each, TimeoutError | EngineClientError):
            unavailable[engine_name(model, number)] = str(each) or "it does not answer"
        elif isinstance(each, BaseException):
            raise each
        else:
            data += each[0]
            num_unfinished += each[1]
    body = LiveRequests(data=data, num_unfinished=num_unfinished, unavailable=unavailable)
    return json_response(body)


async def _of_engine(
    model: ServedModel, caller: Caller, timeout_s: float
) -> tuple[list[LiveRequest], int]:
    if model.resting is not None:
        return [], 0
    async with asyncio.timeout(timeout_s):
        llm = await model.ready()
        ids = await _ids(llm, caller)
        infos = await asyncio.gather(*(_info(llm, each) for each in ids[:_MAX_LISTED]))
    name = model.names[0]
    return [_live_request(info, name) for info in infos if info is not None], len(ids)


async def _ids(llm: AsyncLLM, caller: Caller) -> Sequence[str]:
    """The engine's ids."""
    if caller.is_admin:
        try:
            return await llm.request_ids()
        except CallRefused as error:
            if error.code is not ErrorCode.PERMISSION_DENIED:
                raise
    of_this_server = llm.session.requests.in_flight()
    return [
        wire_id
        for each in of_this_server
        if caller.is_admin or caller.owns(each.wire.tenant)
        for wire_id in each.wire_ids
    ]


async def _info(llm: AsyncLLM, request_id: str) -> RequestInfo | None:
    try:
        return await llm.request_info(request_id)
    except CallRefused:  # it has just ended
        return None


def _live_request(info: RequestInfo, model: str) -> LiveRequest:
    return LiveRequest(
        id=info.request_id,
        model=model,
        status=info.status,
        tenant=info.tenant,
        priority=info.priority,
        num_prompt_tokens=info.num_prompt_tokens,
        num_cached_tokens=None if info.cache_lookup is None else info.cache_lookup.num_tokens,
        num_computed_tokens=info.num_computed_tokens,
        num_output_tokens=info.num_output_tokens,
        num_preemptions=len(info.preemptions),
        num_requests_ahead=info.num_requests_ahead,
        waits_for=None if info.waits_for is None else info.waits_for.value,
        why=info.why,
    )


OPERATIONS = [
    Operation(method="GET", path="/v1/requests", handler=list_requests, gives=LiveRequests)
]
