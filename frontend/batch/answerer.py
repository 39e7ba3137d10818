"""Asks an engine what lines ask: by the routes of the HTTP server, in this process."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.types import ASGIApp

from frontend.batch.lines import BatchAnswer, Error, Response, new_id, read_question, refused
from frontend.errors import EngineUnavailable

Lines = Iterable[tuple[int, bytes]]
"""Lines with their numbers."""
OnAnswer = Callable[[BatchAnswer], None]

_MOST_IN_FLIGHT = 1024
_RETRY_S = 1.0
_TOO_MANY, _UNAVAILABLE = 429, 503


class _Told(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Refusal(msgspec.Struct):
    error: _Told = msgspec.field(default_factory=_Told)


class Answerer:
    """
    Args:
        app: the server's routes.
        in_flight: bounds the requests at once, perhaps of several of these.
        scope: what the scope of a request to a path has besides.
    """

    def __init__(
        self,
        app: ASGIApp,
        in_flight: asyncio.Semaphore | None = None,
        scope: Callable[[str], Mapping[str, Any]] = lambda _path: {},
    ) -> None:
        self._app = app
        self._in_flight = in_flight or asyncio.Semaphore(_MOST_IN_FLIGHT)
        self._scope = scope

    async def answer(self, number: int, line: bytes) -> BatchAnswer:
        """Of the line with this number. What its request is refused for is its answer.
        Raises EngineUnavailable: it can be asked again, where an engine is."""
        question = read_question(number, line)
        if question.refusal is not None:
            return refused(question.custom_id, question.refusal)
        body = msgspec.json.encode(question.body)
        while True:
            async with self._in_flight:
                status, request_id, answer = await self._post(question.url, body)
            if status != _TOO_MANY:  # the queue of an engine that others use, too
                break
            await asyncio.sleep(_RETRY_S)
        error = None
        if status >= 400:
            told = _Told(answer.decode(errors="replace"))
            with contextlib.suppress(msgspec.DecodeError):
                told = msgspec.json.decode(answer, type=_Refusal).error
            if status == _UNAVAILABLE:
                raise EngineUnavailable(told.message)
            error = Error(str(told.code or status), told.message)
        response = Response(status, request_id, msgspec.Raw(answer or b"null"))
        return BatchAnswer(new_id(), question.custom_id, response, error)

    async def answer_all(self, lines: Lines, on_answer: OnAnswer) -> None:
        """Many at once; `on_answer` gets each as it comes. Raises EngineUnavailable."""
        given = list(lines)
        left = iter(given)

        async def work() -> None:
            for number, line in left:
                on_answer(await self.answer(number, line))

        tasks = [asyncio.create_task(work()) for _ in range(min(len(given), _MOST_IN_FLIGHT))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _post(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        """Status, request id and body of the answer."""
        unsent = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not unsent:
                await asyncio.Event().wait()  # this client does not leave
            return unsent.pop()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            **self._scope(path),
        }
        try:
            await self._app(scope, receive, send)
        except Exception:  # raised again once it was answered with 500, and logged
            if not sent:
                raise
        start, *chunks = sent
        request_id = dict(start["headers"]).get(b"x-request-id", b"").decode()
        return start["status"], request_id, b"".join(each.get("body", b"") for each in chunks)
