"""GET /v1/requests: unfinished requests, and why each waits."""

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.engine_calls import Engine
from frontend.http.ask_engines import Resting, ask_engines
from frontend.http.event_stream import json_response
from frontend.http.exchange import exchange_of
from frontend.http.operations import operation
from frontend.http.served_models import ServedModel
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
        if caller.is_admin:
            infos = await engine.request_infos()
            return [_live_request(each, model) for each in infos.requests], infos.num_unfinished
        own = {
            wire_id
            for each in engine.session.requests.in_flight(engine.session)
            if caller.owns(each.wire.tenant)
            for wire_id in each.wire_ids
        }
        infos = await engine.request_infos(caller.caller)
        return [_live_request(e, model) for e in infos.requests if e.request_id in own], len(own)

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
