"""Between socket and routes: keys, limits, request ids, the access log."""

import contextlib
import ipaddress
import json
import logging
import math
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from frontend.http.api_errors import ApiError, error_response
from frontend.http.api_keys import ApiKeys
from frontend.http.exchange import Exchange, current_exchange
from frontend.http.settings import ServerSettings
from frontend.request_state import RequestState, current_tracer
from frontend.shared_threads import current_owner
from protocol.logs import DATE_FORMAT, json_line, printable

access_logger = logging.getLogger("frontend.http.access")

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_LOCAL_NAME = re.compile(r"localhost|.+\.(localhost|local|internal)")
_MAX_LOGGED_PATH = 200
UPLOADS = "/api/blobs/"
"""Below this path bodies are of any size, and may take long to come."""


class Door:
    """ASGI middleware. Without keys everybody is answered.

    Args:
        open_paths: answered without a key, as the page's files are.
        tracer: of `current_tracer`, for each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ServerSettings,
        keys: ApiKeys | None,
        open_paths: frozenset[str],
        tracer: Callable[[RequestState], Callable[[], None]] | None,
    ) -> None:
        self._app = app
        self._settings = settings
        self._keys = keys
        self._open_paths = open_paths
        self._tracer = tracer
        # behind another name than this machine's a hostile page would be of the same origin (DNS
        # rebinding)
        self._checks_host = (
            settings.uds is None and settings.forwarded_allow_ips is None and settings.is_local
        )
        self._in_use = _InUse(settings.max_concurrent_requests, None)
        self._in_use_by_key: dict[str, _InUse] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.setdefault("exchange", Exchange(path=scope["path"], headers=Headers(scope=scope)))
        exchange: Exchange = scope["exchange"]
        context = current_exchange.set(exchange)
        owner = current_owner.set(None)
        tracing = current_tracer.set(self._tracer)
        send = _with_request_id(send, exchange)
        try:
            with contextlib.ExitStack() as in_use:
                try:
                    if not exchange.is_batch:
                        self._admit(scope, exchange, in_use)
                    current_owner.set(exchange.caller)
                except ApiError as error:
                    await error_response(error, scope["path"])(scope, receive, send)
                else:
                    is_upload = scope["path"].startswith(UPLOADS)
                    await self._app(scope, receive if is_upload else self._limited(receive), send)
        finally:
            current_exchange.reset(context)
            current_owner.reset(owner)
            current_tracer.reset(tracing)
            for call in exchange.at_end:
                call()
            if self._settings.access_log != "off":
                _log(scope, exchange, self._settings)

    def _admit(self, scope: Scope, exchange: Exchange, in_use: contextlib.ExitStack) -> None:
        """Raises ApiError."""
        headers = exchange.headers
        is_open = scope["path"] in self._open_paths or scope["path"].startswith("/page/")
        exchange.caller = scope["client"][0] if scope.get("client") else "local"
        if self._keys is None:
            self._check_page(scope, headers)
        elif not is_open:
            exchange.key = self._keys.find(_given_key(headers))
            if exchange.key is None:
                raise ApiError(
                    401,
                    "this server answers only requests with a valid API key; send it as "
                    "'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    code="invalid_api_key",
                )
            exchange.caller = exchange.key.name
        request_id = headers.get("x-request-id")
        if request_id:
            if not _REQUEST_ID.fullmatch(request_id):
                raise ApiError(400, "X-Request-Id must have 1 to 128 visible ASCII characters")
            exchange.request_id = request_id
        encoding = headers.get("content-encoding", "identity")
        if encoding != "identity":
            what = f"the body's content-encoding is {encoding!r}; send it without"
            raise ApiError(415, what)
        is_upload = scope["path"].startswith(UPLOADS)
        self._check_size(0 if is_upload else int(headers.get("content-length") or 0))
        if is_open or scope["method"] != "POST":  # the state can be seen while all is full
            return
        key = exchange.key
        if key is not None:
            limits = _InUse(key.max_concurrent_requests, key.requests_per_minute)
            of_key = self._in_use_by_key.setdefault(key.name, limits)
            in_use.enter_context(of_key.one_more(f"key {key.name!r}"))
        in_use.enter_context(self._in_use.one_more("this server"))

    def _check_page(self, scope: Scope, headers: Mapping[str, str]) -> None:
        """Without keys, any web page that the user opens could use the server."""
        host = _host_name(f"//{headers.get('host', '')}")
        if self._checks_host and host and not _is_this_machine(host):
            raise ApiError(
                403,
                f"the request is for host {host!r}, and this server answers only those for "
                "localhost; use http://127.0.0.1, or start it with --api-key",
            )
        origin = headers.get("origin")
        is_page = origin is not None and (origin == "null" or origin.startswith("http"))
        if not is_page or {"*", origin} & set(self._settings.cors_origin):
            return
        assert origin is not None
        if _host_name(origin) != host and not _is_this_machine(_host_name(origin)):
            raise ApiError(
                403, f"pages of {origin} may not use this server; allow it with --cors-origin"
            )

    def _check_size(self, num_bytes: int) -> None:
        limit = self._settings.max_body_size
        if num_bytes > limit:
            raise ApiError(
                413,
                f"the body has {num_bytes} bytes or more, the limit is {limit}; shorten it, or "
                "raise --max-body-size",
            )

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check_size(num_bytes)
            return message

        return receive_limited


class _InUse:
    """Requests that run, and those that may still begin within a minute. None: no limit."""

    def __init__(self, max_concurrent: int | None, per_minute: int | None) -> None:
        self._max_concurrent = max_concurrent
        self._per_minute = per_minute
        self._num_running = 0
        self._num_allowed = float(per_minute or 0)
        self._counted_s = time.monotonic()

    @contextlib.contextmanager
    def one_more(self, whose: str) -> Iterator[None]:
        """Raises ApiError."""
        if self._num_running == self._max_concurrent:
            raise ApiError(
                429,
                f"{whose} has {self._num_running} requests running, the limit is "
                f"{self._max_concurrent}; send it again when one has ended",
                code="too_many_requests",
                retry_after_s=1,
            )
        if self._per_minute is not None:
            self._count(whose, self._per_minute)
        self._num_running += 1
        try:
            yield
        finally:
            self._num_running -= 1

    def _count(self, whose: str, per_minute: int) -> None:
        now_s = time.monotonic()
        gained = (now_s - self._counted_s) * per_minute / 60
        self._num_allowed = min(float(per_minute), self._num_allowed + gained)
        self._counted_s = now_s
        if self._num_allowed < 1:
            raise ApiError(
                429,
                f"{whose} may send {per_minute} requests a minute; wait",
                code="rate_limit_exceeded",
                retry_after_s=math.ceil((1 - self._num_allowed) * 60 / per_minute),
            )
        self._num_allowed -= 1


def _given_key(headers: Mapping[str, str]) -> str:
    kind, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return "?"


def _is_this_machine(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))  # an address cannot be given another meaning
    return bool(_LOCAL_NAME.fullmatch(host)) or host == socket.gethostname().lower()


def _with_request_id(send: Send, exchange: Exchange) -> Send:
    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            exchange.status = message["status"]
            request_id = (b"x-request-id", exchange.request_id.encode())
            others = [each for each in message["headers"] if each[0] != b"x-request-id"]
            message = {**message, "headers": [*others, request_id]}
        await send(message)

    return send_with_id


def _log(scope: Scope, exchange: Exchange, settings: ServerSettings) -> None:
    line = {
        "method": scope["method"],
        "path": scope["raw_path"].decode("ascii", "replace")[:_MAX_LOGGED_PATH],
        "status": exchange.status or 499,
        "ms": round((time.monotonic() - exchange.started_s) * 1000, 1),
        "caller": exchange.caller,
        "request_id": exchange.request_id,
        "prompt_tokens": exchange.num_prompt_tokens,
        "output_tokens": exchange.num_output_tokens,
    }
    if "json" in (settings.access_log, settings.log_format):
        what = "{method} {path} {status}".format_map(line)
        text = json.dumps(json_line("info", access_logger.name, what, time.time()) | line)
    else:
        text = time.strftime(DATE_FORMAT) + "".join(f" {k}={v}" for k, v in line.items())
    access_logger.info("%s", printable(text))
