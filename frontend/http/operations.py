"""Routes as data, and the OpenAPI document of all of them."""

import re
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frontend.http.api_errors import error_type
from frontend.http.decoding import decode, read_body
from frontend.http.event_stream import EventStream, LineStream
from frontend.http.exchange import exchange_of
from frontend.http.on_demand.while_starting import begins_while_starting
from frontend.text.long_texts import give_back_memory

Handler = Callable[..., Awaitable[Response]]
"""Gets the request and, where the route takes one, its body."""


class Operation(msgspec.Struct, frozen=True):
    """One route. Its handler's docstring is its summary.

    Args:
        path: with parameters as Starlette writes them.
        takes: the body's type; what is not of it is refused.
        gives: the answer's type; None: plain text.
        event, line: the type of one event, or one line, of its stream.
        needs_key: whether it is for callers with a key only, on a server with keys.
    """

    method: str
    path: str
    handler: Handler
    takes: type | None = None
    gives: Any = None
    event: Any = None
    line: Any = None
    needs_key: bool = True

    def route(self) -> Route:
        handler = self.handler if self.takes is None else self._decoding(self.takes)
        if self.event is not None:
            handler = begins_while_starting(handler)
        return Route(self.path, handler, methods=[self.method])

    def _decoding(self, kind: type) -> Handler:
        decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)

        async def handle(request: Request) -> Response:
            body = await read_body(request.stream())
            asked = await decode(decoder, body)
            exchange_of(request).wants_stream = getattr(asked, "stream", None) is True
            try:
                return await self.handler(request, asked)
            finally:
                give_back_memory(len(body))

        return handle


def operation(method: str, path: str, **described: Any) -> Callable[[Handler], Operation]:
    """A decorator: the function becomes the operation that it handles."""
    return lambda handler: Operation(method, path, handler, **described)


def openapi_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """OpenAPI 3.1. Schemas are those of the msgspec Structs that bodies are decoded with."""
    types = {
        kind
        for operation in operations
        for kind in (
            *(operation.takes, operation.gives, operation.event, operation.line),
            error_type(operation.path),
        )
        if kind is not None
    }
    ordered = sorted(types, key=str)
    schemas, components = msgspec.json.schema_components(
        ordered, ref_template="#/components/schemas/{name}"
    )
    for component in components.values():
        if component.get("additionalProperties") is False:
            component["additionalProperties"] = {"type": "null"}  # see `decode`
    schema_of = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for operation in operations:
        path = operation.path.replace(":path}", "}")
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "engine-core", "version": version("engine-core")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(operation: Operation, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    if operation.gives is not None:
        answers["application/json"] = {"schema": schema_of[operation.gives]}
    elif operation.event is None:
        answers["text/plain"] = {"schema": {"type": "string"}}
    if operation.event is not None:
        answers[EventStream.media_type] = {"schema": schema_of[operation.event]}
    if operation.line is not None:
        answers[LineStream.media_type] = {"schema": schema_of[operation.line]}
    refusal = {"application/json": {"schema": schema_of[error_type(operation.path)]}}
    described: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", operation.method.lower() + operation.path),
        "summary": (operation.handler.__doc__ or "").strip().splitlines()[0],
        "responses": {
            "200": {"description": "The answer.", "content": answers},
            "4XX": {"description": "The request is refused.", "content": refusal},
            "5XX": {"description": "It cannot be served now, or failed.", "content": refusal},
        },
    }
    if operation.takes is not None:
        content = {"application/json": {"schema": schema_of[operation.takes]}}
        described["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in operation.path.replace(":path}", "}").split("/") if "{" in part]
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return described
