"""GET /v1/requests: unfinished requests, and why each waits."""

import asyncio
from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine_calls import Engine
from frontend.errors import CallRefused, EngineClientError
from frontend.http.event_stream import json_response
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.health import engine_name, engines_of
from frontend.http.operations import operation
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


@operation("GET", "/v1/requests", gives=LiveRequests)
async def list_requests(request: Request) -> Response:
    """Unfinished requests and why each waits: the caller's own, for an admin's key all."""
    models: ServedModels = request.app.state.models
    settings: ServerSettings = request.app.state.settings
    caller = exchange_of(request)
    found = await asyncio.gather(
        *(_of_model(model, n, caller, settings.health_timeout) for n, model in enumerate(models))
    )
    data: list[LiveRequest] = []
    num_unfinished, unavailable = 0, {}
    for name, each in ((name, each) for of_model in found for name, each in of_model.items()):
        if isinstance(each, Exception):
            unavailable[name] = str(each) or "it does not answer"
        else:
            data += each[0]
            num_unfinished += each[1]
    body = LiveRequests(data=data, num_unfinished=num_unfinished, unavailable=unavailable)
    return json_response(body)


_Answer = tuple[list[LiveRequest], int] | TimeoutError | EngineClientError


async def _of_model(
    model: ServedModel, number: int, caller: Exchange, timeout_s: float
) -> dict[str, _Answer]:
    """By engine."""
    try:
        async with asyncio.timeout(timeout_s):
            engines = await engines_of(model, number)
    except (TimeoutError, EngineClientError) as error:
        return {engine_name(model, number): error}
    found = await asyncio.gather(
        *(_of_engine(each, model.names[0], caller, timeout_s) for each in engines.values())
    )
    return dict(zip(engines, found, strict=True))


async def _of_engine(engine: Engine, model: str, caller: Exchange, timeout_s: float) -> _Answer:
    try:
        async with asyncio.timeout(timeout_s):
            await engine.session.ready(waits=False)
            ids = await _ids(engine, caller)
            infos = await asyncio.gather(*(_info(engine, each) for each in ids[:_MAX_LISTED]))
    except (TimeoutError, EngineClientError) as error:
        return error
    return [_live_request(info, model) for info in infos if info is not None], len(ids)


async def _ids(engine: Engine, caller: Exchange) -> Sequence[str]:
    """The engine's ids."""
    if caller.is_admin:
        try:
            return await engine.request_ids()
        except CallRefused as error:
            if error.code is not ErrorCode.PERMISSION_DENIED:
                raise
    of_this_server = engine.session.requests.in_flight(engine.session)
    return [
        wire_id
        for each in of_this_server
        if caller.is_admin or caller.owns(each.wire.tenant)
        for wire_id in each.wire_ids
    ]


async def _info(engine: Engine, request_id: str) -> RequestInfo | None:
    try:
        return await engine.request_info(request_id)
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
