"""Answers: one JSON document, or a stream of server-sent events that ends its requests when the
reader leaves."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Sequence,
)
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from frontend.http.api_errors import (
    AnthropicErrorResponse,
    ApiError,
    OllamaErrorResponse,
    api_error,
    error_body,
)
from frontend.outputs import RequestOutput
from frontend.shared_threads import LARGE_ANSWERS

T = TypeVar("T")

logger = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
BEGIN_S = 3.0
"""Seconds after which a stream begins that has nothing to say yet."""
COMMENT_S = 5.0
"""After which a stream that is silent gets a comment: proxies and clients give up on silence."""
_MANY_PARTS = 2**13


def json_response(body: msgspec.Struct | list[Any], status: int = 200) -> Response:
    return Response(_encoder.encode(body), status, media_type="application/json")


def in_pieces(items: Iterable[Any], size: int = 2**14) -> Any:
    """JSON of a list that may be long, `size` elements at once: encoding them holds up others."""
    rest, pieces = iter(items), []
    while piece := list(itertools.islice(rest, size)):
        pieces.append(_encoder.encode(piece)[1:-1])
    return msgspec.Raw(b"[" + b",".join(pieces) + b"]")


async def built(make: Callable[[], T], num_parts: int) -> T:
    """What `make` returns; if it has many parts, made in a thread, so that others have turns.
    Raises QueueFull: see `SharedThreads.run`."""
    if num_parts <= _MANY_PARTS:
        return make()
    return await LARGE_ANSWERS.run(make)


def line(body: Any) -> bytes:
    """A line of one of Ollama's streams."""
    return _encoder.encode(body) + b"\n"


def event(body: msgspec.Struct, name: str | None = None) -> bytes:
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _encoder.encode(body) + b"\n\n"


def error_event(error: ApiError, path: str) -> bytes:
    """How a stream under `path` ends that fails."""
    body = error_body(error, path)
    if isinstance(body, OllamaErrorResponse):
        return line(body)
    if isinstance(body, AnthropicErrorResponse):
        return event(body, body.type)
    return event(body) + DONE


class TextEvents:
    """Events that differ in one text: all around it is encoded once.

    Args:
        example: such an event, in which the text is empty.
        field: the text's name.
    """

    def __init__(self, example: bytes, field: str) -> None:
        name = b'"' + field.encode() + b'":'
        head, _, self._tail = example.partition(name + b'""')  # quotes in strings are escaped
        self._head = head + name

    def event(self, text: str) -> bytes:
        return self._head + _encoder.encode(text) + self._tail


class EventStream(Response):
    """Events of a running request. It ends, and with it the request, when the client disconnects.

    Args:
        events: each a whole event. Closed at the end, whatever ends it.
    """

    media_type = "text/event-stream"
    comment = b": waiting\n\n"
    """Sent every 5 s while a stream is silent; clients skip it."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(None, headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self.events = events
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = await _race(self._write(send), _disconnect(receive), self._comment(send))
        if not writer.cancelled():
            writer.result()

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self.events) as events:
            async for data in events:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _comment(self, send: Send) -> None:
        """Comments are legal in event streams; clients skip them."""
        num_sent = -1
        while True:
            if num_sent == self._num_sent and self.media_type == EventStream.media_type:
                comment = {"type": "http.response.body", "body": self.comment, "more_body": True}
                await send(comment)
            num_sent = self._num_sent
            await asyncio.sleep(COMMENT_S)


class LineStream(EventStream):
    """Ollama's: one JSON document a line."""

    media_type = "application/x-ndjson"


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _race(first: Awaitable[T], *others: Awaitable[None]) -> asyncio.Future[T]:
    """Wait until one of them ends, and cancel the rest. Returns the first, ended."""
    task, *rest = (asyncio.ensure_future(each) for each in (first, *others))
    try:
        await asyncio.wait((task, *rest), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, *rest):
            each.cancel()
        await asyncio.gather(task, *rest, return_exceptions=True)
    return task  # type: ignore[return-value]


async def until_disconnect(request: Request, answer: Awaitable[T]) -> T:
    """Raises ClientDisconnect: the client left before the answer, which is cancelled."""
    task = await _race(answer, _disconnect(request.receive))
    if task.cancelled():
        raise ClientDisconnect
    return task.result()


async def begun(events: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`events`, as soon as the first is there or `BEGIN_S` are over: what fails by then can still
    be answered with a status, and who waits for longer gets headers and comments."""

    async def give_up() -> None:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()

    async def all_of_them() -> AsyncGenerator[T, None]:
        try:
            yield await first
            async for each in events:
                yield each
        finally:
            await give_up()

    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait((first,), timeout=BEGIN_S)
        if first.done():
            first.result()
    except BaseException:
        await give_up()
        raise
    return all_of_them()


async def whole(request: Request, outputs: AsyncGenerator[T, None]) -> T:
    """The last of them. Raises ClientDisconnect: see `until_disconnect`."""

    async def last() -> T:
        return [output async for output in outputs][-1]

    return await until_disconnect(request, last())


async def streamed(
    request: Request,
    outputs: AsyncGenerator[T, None],
    events: Callable[[AsyncGenerator[T, None]], AsyncGenerator[bytes, None]],
    last_event: Callable[[ApiError, str], bytes] = error_event,
    form: type[EventStream] = EventStream,
) -> Response:
    """The stream of the `events` that outputs make. What fails soon is raised; what fails later is
    a last event."""
    started = await until_disconnect(request, begun(outputs))
    return form(ending_with_errors(request, events(started), last_event))


async def ending_with_errors(
    request: Request,
    events: AsyncGenerator[bytes, None],
    last_event: Callable[[ApiError, str], bytes] = error_event,
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
            yield last_event(told, request.url.path)


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
            await asyncio.sleep(0)  # it begins, and others have a turn before the next
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
