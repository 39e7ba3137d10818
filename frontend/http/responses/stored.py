"""Responses that are kept or run: GET, DELETE, POST .../cancel, GET .../input_items."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.http.api_errors import ApiError
from frontend.http.event_stream import EventStream, json_response
from frontend.http.exchange import exchange_of
from frontend.http.operations import operation
from frontend.http.responses import bodies
from frontend.http.responses.background import BackgroundRuns
from frontend.http.responses.store import ResponseStore, StoredResponse

_MEDIA_TYPE = "application/json"


def store_of(request: Request) -> ResponseStore:
    found: ResponseStore = request.app.state.responses
    return found


def runs_of(request: Request) -> BackgroundRuns:
    found: BackgroundRuns = request.app.state.background_responses
    return found


async def stored_response(request: Request, response_id: str, status: int = 404) -> StoredResponse:
    """
    Args:
        status: of the refusal; 400: a request names it as the one before.

    Raises:
        ApiError: it is not kept.
    """
    stored = await store_of(request).get(response_id, exchange_of(request).owner)
    if stored is None:
        raise ApiError(
            status,
            f"the response {response_id!r:.200} is not kept here: it was not stored, has not ended "
            "or was dropped for newer ones; send the conversation as input",
            param="previous_response_id" if status == 400 else "response_id",
            code="previous_response_not_found" if status == 400 else "not_found",
        )
    return stored


def _query(request: Request, *names: str) -> dict[str, str]:
    """Raises ApiError: a parameter of another name."""
    for name in request.query_params:
        if name.removesuffix("[]") not in names:
            raise ApiError(400, f"{name!r:.100} is not supported; omit it", param=name)
    return dict(request.query_params)


def _number(query: dict[str, str], name: str, default: int, most: int) -> int:
    given = query.get(name, str(default))
    if not given.isdecimal() or int(given) > most:
        raise ApiError(400, f"{name} is {given!r:.100}, it must be 0 to {most}", param=name)
    return int(given)


@operation(
    "GET", "/v1/responses/{response_id}", gives=bodies.ResponseObject, event=bodies.ResponseEvent
)
async def get_response(request: Request) -> Response:
    """A response that was kept or still runs; with `stream=true` its events, if it runs in the
    background and was asked for as a stream: those after the one of number `starting_after`."""
    query = _query(request, "stream", "starting_after", "include", "include_obfuscation")
    response_id = request.path_params["response_id"]
    run = runs_of(request).get(response_id, exchange_of(request).owner)
    stored = await stored_response(request, response_id) if run is None else None
    if query.get("stream") not in ("true", "True", "1"):
        body = msgspec.json.encode(run.writer.response) if run else stored and stored.response
        return Response(body, media_type=_MEDIA_TYPE)
    first = _number(query, "starting_after", -1, 2**31) + 1 if "starting_after" in query else 0
    if run is not None and run.streams:
        return EventStream(run.follow(first))
    if stored is None or stored.events is None:
        what = "stream is true, and the response was not asked for with background and stream"
        raise ApiError(400, f"{what}; omit it", param="stream")
    return Response(b"".join(stored.events[first:]), media_type=EventStream.media_type)


@operation("DELETE", "/v1/responses/{response_id}", gives=bodies.DeletedResponse)
async def delete_response(request: Request) -> Response:
    """Forget a response; one that runs is cancelled."""
    response_id, owner = request.path_params["response_id"], exchange_of(request).owner
    if (run := runs_of(request).get(response_id, owner)) is not None:
        await run.cancel()
    await stored_response(request, response_id)
    await store_of(request).delete(response_id, owner)
    return json_response(bodies.DeletedResponse(id=response_id))


@operation("POST", "/v1/responses/{response_id}/cancel", gives=bodies.ResponseObject)
async def cancel_response(request: Request) -> Response:
    """End a response that runs in the background; of one that is over nothing changes."""
    response_id = request.path_params["response_id"]
    if (run := runs_of(request).get(response_id, exchange_of(request).owner)) is not None:
        await run.cancel()
    stored = await stored_response(request, response_id)
    if not msgspec.json.decode(stored.response)["background"]:
        what = f"the response {response_id!r} does not run in the background; close its connection"
        raise ApiError(400, what, param="response_id")
    return Response(stored.response, media_type=_MEDIA_TYPE)


@operation("GET", "/v1/responses/{response_id}/input_items", gives=bodies.InputItemList)
async def list_input_items(request: Request) -> Response:
    """The items that a response was asked with, the last first unless `order` is asc."""
    query = _query(request, "order", "limit", "after", "include")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise ApiError(400, f"order is {order!r:.100}, it must be asc or desc", param="order")
    limit = _number(query, "limit", 20, 100)
    stored = await stored_response(request, request.path_params["response_id"])
    num_answered = len(msgspec.json.decode(stored.response)["output"])
    items: list[dict[str, Any]] = msgspec.json.decode(stored.items)
    asked = items[stored.num_before : len(items) - num_answered]
    ordered = asked if order == "asc" else asked[::-1]
    ids = [each["id"] for each in ordered]
    first = 0
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise ApiError(400, f"after is {after!r:.100}, no id of an item here", param="after")
        first = ids.index(after) + 1
    page = ordered[first : first + limit]
    return json_response(
        bodies.InputItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=first + limit < len(ordered),
        )
    )


OPERATIONS = [get_response, delete_response, cancel_response, list_input_items]
