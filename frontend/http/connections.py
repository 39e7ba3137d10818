"""A connection's limits: of the head's bytes, of the time to send a request, and of the time that
a client may read nothing."""

import asyncio
import contextlib
import itertools
import resource
from typing import Any, ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from frontend.http.api_errors import ApiError
from frontend.http.door import UPLOADS
from frontend.http.exchange import Exchange

_MAX_HEAD_BYTES = 64 * 1024
"""Also of what stands between two pieces of a body, or behind the last: extensions, trailers."""
_MAX_HEADERS = 256
_MAX_CONNECTIONS = 65_536
_OTHER_DESCRIPTORS = 128
_UNREAD_S = 300.0
"""A client that takes in nothing of its answer for so long is disconnected."""


class _UntilClosed(int):
    """The length of a body that ends with its connection: HTTP/1.0 has no chunks."""

    def __lt__(self, _num_bytes: int) -> bool:
        return False

    def __sub__(self, _num_bytes: int) -> "_UntilClosed":
        return self


class LimitedConnection(HttpToolsProtocol):
    """Refuses with status 408 and 431."""

    request_timeout_s: ClassVar[float] = 60.0
    max_connections: ClassVar[int] = 10_000
    """Further ones are closed at once: libzmq ends a process that has no descriptor left."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._is_head = True
        self._reading: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []
        """Requests that are not answered whole yet; those behind the first are pipelined."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            transport.abort()
            return
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timers("_reading", "_unread")
        for cycle in self._cycles:  # uvicorn itself tells the last one only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._reading is None:
            self._expect_request()
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._refuse_head()

    def on_message_begin(self) -> None:
        self._is_head = True
        if self._reading is None:
            self._expect_request()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_head:  # trailers say nothing here
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        is_read = self._reading is not None and not self.cycle.response_complete
        if is_read and self.scope["path"].startswith(UPLOADS):  # as long as it comes
            self._end_timers("_reading")
            self._expect_request()
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if len(self.headers) > _MAX_HEADERS:
            self._refuse(431, f"the head has more than {_MAX_HEADERS} headers; send fewer")
        if len(self.url) + sum(map(len, itertools.chain(*self.headers))) > _MAX_HEAD_BYTES:
            self._refuse_head()  # it came at once
        self._is_head, self._head_bytes = False, 0
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClosed()
        unanswered = [each for each in self._cycles if not each.response_complete]
        self._cycles = [*unanswered, self.cycle]

    def on_message_complete(self) -> None:
        self._is_head, self._head_bytes = True, 0
        self._end_timers("_reading")
        super().on_message_complete()

    def shutdown(self) -> None:
        """The server stops: what ends by itself is waited for."""
        super().shutdown()
        exchange = None if self.cycle is None else self.cycle.scope.get("exchange")
        if isinstance(exchange, Exchange) and exchange.is_endless:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_timers("_unread")

    def _expect_request(self) -> None:
        self._reading = self.loop.call_later(self.request_timeout_s, self._time_out)

    def _end_timers(self, *names: str) -> None:
        for name in names:
            timer: asyncio.TimerHandle | None = getattr(self, name)
            if timer is not None:
                timer.cancel()
                setattr(self, name, None)

    def _time_out(self) -> None:
        self._reading = None
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            return  # stray bytes behind a request that is being answered
        self._refuse(
            408, f"the request was not whole within {self.request_timeout_s:g} s; send it again"
        )

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head is larger than {_MAX_HEAD_BYTES} bytes; shorten it")

    def _refuse(self, status: int, message: str) -> None:
        """Says why, where nothing has been said yet."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if self._head_bytes and (cycle is None or cycle.response_complete):
            body = msgspec.json.encode(ApiError(status, message).body())
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(
                STATUS_LINE[status] + head.encode() + b"connection: close\r\n\r\n" + body
            )
        self.transport.close()


def most_connections() -> int:
    """That the limit of descriptors leaves room for, raised to what the system lets this user
    have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft == resource.RLIM_INFINITY:
        return _MAX_CONNECTIONS
    return max(1, min(_MAX_CONNECTIONS, soft - _OTHER_DESCRIPTORS))
