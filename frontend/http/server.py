"""The process: listens, serves, and stops when it is told to."""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from importlib.metadata import version
from types import FrameType

import uvicorn

from frontend.errors import EngineDied
from frontend.event_loop import run
from frontend.http.api_keys import ApiKeys
from frontend.http.app import make_app
from frontend.http.connections import LimitedConnection, most_connections
from frontend.http.door import access_logger
from frontend.http.listeners import listening
from frontend.http.served_models import ServedModels
from frontend.http.settings import ServerSettings
from protocol.logs import LogFormat, log_to_stderr

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 100
"""Longer than clients keep idle connections (httpx 5 s, aiohttp 15, Go 90): where the server closes
first, a request that comes just then is lost."""


def and_page(url: str) -> str:
    """A sentence about the page's address, if a browser can go there."""
    return "" if url.startswith("unix://") else f"; chat and scheduler for browsers: {url}/"


@dataclass(frozen=True)
class Backend:
    """
    Args:
        lost: returns, with the reason, when the server has nothing to serve any more.
        text: said when the server is ready, behind its address.
    """

    models: ServedModels
    lost: Callable[[], Awaitable[str]] | None = None
    text: Callable[[str], str] = lambda url: f"Serving at {url}/v1{and_page(url)}"


def serve(settings: ServerSettings, start: Callable[[], Awaitable[Backend]]) -> int:
    """Serve until SIGINT or SIGTERM; a second one ends what still runs. Returns the exit code.

    Args:
        start: called when the address is taken; the server answers once it has returned.

    Raises:
        InvalidInput: the settings contradict each other.
        AddressUnavailable: something else listens there.
        EngineClientError: of `start`; EngineDied if the backend was lost.
    """
    keys = settings.check()
    _log_to_stderr(settings.log_format)
    with listening(settings) as (url, sockets):
        run(_serve(settings, keys, start, url, sockets))
    return 0


def _print_ready(url: str, text: str, *, is_json: bool) -> None:
    """A text for a person, or one line of JSON; then the log has the text, too."""
    document = {"event": "ready", "url": url, "pid": os.getpid(), "version": version("engine-core")}
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.write((text if sys.stdout.isatty() else json.dumps(document)) + "\n")
        sys.stdout.flush()
        if is_json:
            logger.info("%s", text.strip())
        elif not sys.stdout.isatty():
            sys.stderr.write(text + "\n")


def make_config(
    settings: ServerSettings, keys: ApiKeys | None, models: ServedModels
) -> uvicorn.Config:
    """uvicorn's, but for the sockets."""
    LimitedConnection.request_timeout_s = settings.request_timeout
    LimitedConnection.max_connections = most_connections()
    return uvicorn.Config(
        make_app(models, settings, keys),
        http=LimitedConnection,
        ws="none",
        log_config=None,
        log_level=logging.CRITICAL,  # the application logs what fails
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        proxy_headers=settings.forwarded_allow_ips is not None,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=settings.drain_timeout,
    )


async def _serve(
    settings: ServerSettings,
    keys: ApiKeys | None,
    start: Callable[[], Awaitable[Backend]],
    url: str,
    sockets: list[socket.socket],
) -> None:
    backend = await start()
    try:
        config = make_config(settings, keys, backend.models)
        is_json = settings.log_format == "json"
        server = _Server(config, lambda: _print_ready(url, backend.text(url), is_json=is_json))
        lost = asyncio.ensure_future(_end_when_lost(server, backend))
        await server.serve(sockets)
        if lost.done():
            raise EngineDied(lost.result(), address=url)
        lost.cancel()
    finally:
        await backend.models.close()


async def _end_when_lost(server: uvicorn.Server, backend: Backend) -> str:
    if backend.lost is None:
        await asyncio.Event().wait()
    assert backend.lost is not None
    reason = await backend.lost()
    if server.should_exit:  # that is why
        await asyncio.Event().wait()
    server.should_exit = True
    return reason


class _Server(uvicorn.Server):
    """Ends with a return instead of the signal; a second signal of any kind ends it at once."""

    def __init__(self, config: uvicorn.Config, say_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._say_ready = say_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._say_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {each: signal.signal(each, self.handle_exit) for each in signals}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def _log_to_stderr(log_format: LogFormat) -> None:
    access_logger.handlers = [logging.StreamHandler(sys.__stderr__)]  # its lines may be JSON
    access_logger.propagate = False
    for own in (access_logger, logger):
        own.setLevel(logging.INFO)
    log_to_stderr("warning", log_format)
