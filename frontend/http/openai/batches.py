"""POST and GET of /v1/batches: files of requests, answered beside what others ask."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from frontend.batch.answerer import Answerer
from frontend.batch.files import FileObject
from frontend.batch.jobs import ENDPOINTS, Batch, Job, Jobs
from frontend.errors import InvalidInput
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.api_keys import ApiKey
from frontend.http.event_stream import json_response
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.openai.files import Page, files, page_of
from frontend.http.operations import operation

_MOST_IN_FLIGHT = 256
"""Requests of all batches at once."""


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class BatchList(Page, frozen=True, kw_only=True):
    data: Sequence[Batch]


@operation("POST", "/v1/batches", takes=BatchRequest, gives=Batch)
async def create_batch(request: Request, asked: BatchRequest) -> Response:
    """Answer the requests of a file."""
    if asked.endpoint not in ENDPOINTS:
        raise not_supported("endpoint", asked.endpoint, "use " + ", ".join(ENDPOINTS))
    exchange = exchange_of(request)
    try:
        files(request).load(exchange.owner, asked.input_file_id, FileObject)
    except KeyError:
        what = f"input_file_id is {asked.input_file_id!r:.100}, no file of yours; upload it first"
        raise ApiError(400, what, param="input_file_id") from None
    key = exchange.key
    try:
        made = _jobs(request).create(
            asked.endpoint,
            asked.input_file_id,
            asked.metadata,
            owner=exchange.owner,
            caller=exchange.caller,
            min_priority=None if key is None else key.min_priority,
        )
    except InvalidInput as error:
        raise ApiError(429, str(error)) from None
    return json_response(made)


@operation("GET", "/v1/batches", gives=BatchList)
async def list_batches(request: Request) -> Response:
    """The caller's batches."""
    found = _jobs(request).all_of(exchange_of(request).owner)
    return json_response(BatchList(**page_of(request, found, ("after", "limit"), 20)))


@operation("GET", "/v1/batches/{batch_id}", gives=Batch)
async def get_batch(request: Request) -> Response:
    """How far a batch is."""
    return json_response(_of(request, _jobs(request).find))


@operation("POST", "/v1/batches/{batch_id}/cancel", gives=Batch)
async def cancel_batch(request: Request) -> Response:
    """End a batch; what is answered stays."""
    try:
        return json_response(_of(request, _jobs(request).cancel))
    except InvalidInput as error:
        raise ApiError(409, str(error)) from None


def _jobs(request: Request) -> Jobs:
    found: Jobs = request.app.state.jobs
    return found


def _of(request: Request, find: Callable[[str | None, str], Batch]) -> Batch:
    batch_id = request.path_params["batch_id"]
    try:
        return find(exchange_of(request).owner, batch_id)
    except KeyError:
        what = f"the batch {batch_id!r:.100} is not here; GET /v1/batches lists yours"
        raise ApiError(404, what, param="batch_id", code="not_found") from None


def answerers(app: ASGIApp) -> Callable[[Job], Answerer]:
    """Makes what asks an application's routes, as the caller of a job."""
    in_flight = asyncio.Semaphore(_MOST_IN_FLIGHT)

    def of_job(job: Job) -> Answerer:
        key = None
        if job.owner is not None:
            key = ApiKey(name=job.owner, min_priority=job.min_priority)

        def scope(path: str) -> Mapping[str, Any]:
            return {"exchange": Exchange(key=key, caller=job.caller, path=path, is_batch=True)}

        return Answerer(app, in_flight, scope)

    return of_job
