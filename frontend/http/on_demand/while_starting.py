"""A stream of a request whose model has to be started first: it begins before, and says so in
comments, which clients skip."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from frontend.http.event_stream import BEGIN_S, COMMENT_S, EventStream, ending_with_errors
from frontend.http.exchange import Exchange, exchange_of
from frontend.http.served_models import served_models

Handler = Callable[[Request], Awaitable[Response]]


def begins_while_starting(handler: Handler) -> Handler:
    """`handler`, whose streams begin when they have waited for their model for `BEGIN_S`."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        if not served_models(request).starts_engines:
            return await handler(request)
        exchange = exchange_of(request)
        answer: asyncio.Future[Response] = asyncio.ensure_future(handler(request))
        try:
            await asyncio.wait((answer,), timeout=BEGIN_S)
            if exchange.waits_for is not None and exchange.wants_stream:
                events, answer = _events(answer, exchange), asyncio.Future()
                return EventStream(ending_with_errors(request, events))
            return await answer
        finally:
            answer.cancel()

    return handle


async def _events(
    answer: asyncio.Future[Response], exchange: Exchange
) -> AsyncGenerator[bytes, None]:
    try:
        while not answer.done():
            state = "waiting" if exchange.waits_for is None else exchange.waits_for()
            yield f": {state}\n\n".encode()
            await asyncio.wait((answer,), timeout=COMMENT_S)
        try:
            response = answer.result()
        except ClientDisconnect:
            return
        if isinstance(response, EventStream):
            async with contextlib.aclosing(response.events) as events:
                async for each in events:
                    yield each
    finally:
        answer.cancel()
