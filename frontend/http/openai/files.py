"""POST, GET and DELETE of /v1/files: files that batches read, and those that they gave."""

import asyncio
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from frontend.batch.files import FileObject, FileStore
from frontend.batch.jobs import Batch, Jobs
from frontend.errors import InvalidInput
from frontend.http.api_errors import ApiError, not_supported
from frontend.http.event_stream import json_response
from frontend.http.exchange import exchange_of
from frontend.http.operations import operation

T = TypeVar("T", FileObject, Batch)

_FIELDS = ("after", "limit", "order", "purpose")


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page, frozen=True, kw_only=True):
    data: Sequence[FileObject]


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


@operation("POST", "/v1/files", gives=FileObject)
async def upload(request: Request) -> Response:
    """Keep a file of requests for a batch."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise ApiError(400, "the body is no multipart/form-data; send a form with a file")
    async with request.form(max_files=1, max_fields=8) as form:
        for name in form:
            if name not in ("file", "purpose"):
                raise ApiError(400, f"{name!r:.100} is not supported; omit it", param=name)
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "file is missing; give a file of lines in JSON", param="file")
        if purpose != "batch":
            raise not_supported("purpose", purpose, 'use "batch"')
        name = (file.filename or "file")[:255]
        owner = exchange_of(request).owner
        try:
            made = await asyncio.to_thread(files(request).add, owner, name, "batch", file.file)
        except InvalidInput as error:
            raise ApiError(413, str(error), param="file") from None
    return json_response(made)


@operation("GET", "/v1/files", gives=FileList)
async def list_files(request: Request) -> Response:
    """The caller's files."""
    found = files(request).all_of(exchange_of(request).owner, "file-", FileObject)
    purpose = request.query_params.get("purpose")
    found = [each for each in found if purpose in (None, each.purpose)]
    return json_response(FileList(**page_of(request, found, _FIELDS, 10_000)))


@operation("GET", "/v1/files/{file_id}", gives=FileObject)
async def get_file(request: Request) -> Response:
    """Describe a file."""
    return json_response(_file(request))


@operation("GET", "/v1/files/{file_id}/content")
async def get_content(request: Request) -> Response:
    """A file, as it is."""
    path = files(request).path(exchange_of(request).owner, _file(request).id)
    return FileResponse(path, media_type="application/octet-stream")


@operation("DELETE", "/v1/files/{file_id}", gives=FileDeleted)
async def delete_file(request: Request) -> Response:
    """Delete a file that no batch needs."""
    owner, file_id = exchange_of(request).owner, _file(request).id
    jobs: Jobs = request.app.state.jobs
    if (batch := jobs.reads(owner, file_id)) is not None:
        raise ApiError(409, f"{batch} reads {file_id}; wait for its end, or cancel it")
    files(request).delete(owner, file_id)
    return json_response(FileDeleted(id=file_id))


def files(request: Request) -> FileStore:
    """The files of the server that answers."""
    found: FileStore = request.app.state.files
    return found


def page_of(
    request: Request, found: Sequence[T], fields: Sequence[str], most: int
) -> dict[str, Any]:
    """The fields of a Page, newest first unless `order` says otherwise.

    Args:
        fields: of the query that are known.
        most: how many there are where `limit` says nothing.
    """
    given = request.query_params
    for name in given.keys() - {*fields}:
        raise ApiError(400, f"{name!r:.100} is not supported; omit it", param=name)
    limit, order = given.get("limit", str(most)), given.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= 10_000):
        raise ApiError(400, f"limit is {limit!r:.100}, it must be 1 to 10000", param="limit")
    if order not in ("asc", "desc"):
        raise not_supported("order", order, 'use "asc" or "desc"')
    ordered = sorted(found, key=lambda each: (each.created_at, each.id), reverse=order == "desc")
    if (after := given.get("after")) is not None:
        ids = [each.id for each in ordered]
        if after not in ids:
            raise ApiError(400, f"after is {after!r:.100}, which is not in the list", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return {
        "data": page,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(ordered) > len(page),
    }


def _file(request: Request) -> FileObject:
    file_id = request.path_params["file_id"]
    try:
        return files(request).load(exchange_of(request).owner, file_id, FileObject)
    except KeyError:
        what = f"the file {file_id!r:.100} is not here; GET /v1/files lists yours"
        raise ApiError(404, what, param="file_id", code="not_found") from None
