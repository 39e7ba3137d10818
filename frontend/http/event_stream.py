"""Answers: one JSON document, or a stream of server-sent events that ends its requests when the
reader leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.http.api_errors import ApiError, api_error, decode_error
from frontend.outputs import RequestOutput

T = TypeVar("T")

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"


def json_response(
    body: msgspec.Struct, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(_encoder.encode(body), status, headers, media_type="application/json")


def event(body: msgspec.Struct, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encoder.encode(body) + b"\n\n"


class EventStream(Response):
    """Events of a running request. It ends, and with it the request, when the client disconnects.

    Args:
        events: each a whole event. Closed at the end, whatever ends it.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((writer, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, leaving):
                task.cancel()
            await asyncio.gather(writer, leaving, return_exceptions=True)
        if not writer.cancelled():
            writer.result()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_disconnect(request: Request, answer: Awaitable[T]) -> T | None:
    """The answer, or None if the client left before: then it is cancelled."""
    task = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def with_first(
    events: AsyncGenerator[T, None],
) -> tuple[T, AsyncGenerator[T, None]]:
    """The first of `events`, and all of them: what fails before the first can still be answered
    with a status."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise

    async def all_of_them() -> AsyncGenerator[T, None]:
        async with contextlib.aclosing(events):
            yield first
            async for each in events:
                yield each

    return first, all_of_them()


async def ending_with_errors(
    events: AsyncGenerator[bytes, None],
    last_event: Callable[[ApiError], bytes] = lambda error: event(error.body()) + DONE,
) -> AsyncGenerator[bytes, None]:
    """A failure after the first event is a last event."""
    async with contextlib.aclosing(events):
        try:
            async for each in events:
                yield each
        except Exception as error:
            told = api_error(error)
            if told is None:
                logger.exception("a stream failed")
                told = ApiError(500, f"the server failed: {type(error).__name__}")
            yield last_event(told)


async def merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several requests as they come, with the number of their request."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as outputs:
            async for output in outputs:
                yield 0, output
        return
    nexts: dict[asyncio.Future[RequestOutput], int] = {}
    try:
        for index, stream in enumerate(streams):
            nexts[asyncio.ensure_future(anext(stream))] = index
        while nexts:
            done, _ = await asyncio.wait(nexts, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                index = nexts.pop(future)
                output = future.result()
                if not output.finished:
                    nexts[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for future in nexts:
            future.cancel()
        await asyncio.gather(*nexts, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def all_outputs(
    outputs: AsyncIterator[tuple[int, RequestOutput]], count: int
) -> list[RequestOutput]:
    """The last output of each of `count` requests."""
    found = {index: output async for index, output in outputs}
    return [found[index] for index in range(count)]


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """
    Raises:
        ApiError: it is not what the route takes.
    """
    try:
        return decoder.decode(body)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise decode_error(error) from None
