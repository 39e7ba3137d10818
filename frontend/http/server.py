"""The process: listens, serves, and stops when it is told to."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator
from importlib.metadata import version
from types import FrameType

import uvicorn

from frontend.event_loop import run
from frontend.http.api_keys import ApiKeys
from frontend.http.app import make_app
from frontend.http.connections import LimitedConnection
from frontend.http.door import access_logger
from frontend.http.listeners import listening
from frontend.http.served_models import ServedModels
from frontend.http.settings import ServerSettings


def serve(
    settings: ServerSettings,
    models: ServedModels,
    say_ready: Callable[[str], None] | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; a second one ends what still runs. Returns the exit code.

    Args:
        say_ready: gets the server's URL; default: print it.

    Raises:
        InvalidInput: the settings contradict each other.
        AddressUnavailable: something else listens there.
    """
    keys = settings.check()
    _log_to_stderr()
    with listening(settings) as (url, sockets):
        config = make_config(settings, keys, models)
        run(_serve(config, models, sockets, lambda: (say_ready or print_ready)(url)))
    return 0


def print_ready(url: str) -> None:
    """One line of JSON, or a text for a person."""
    document = {"event": "ready", "url": url, "pid": os.getpid(), "version": version("engine-core")}
    text = f"Serving at {url}/v1\nCtrl-C stops it." if sys.stdout.isatty() else json.dumps(document)
    with contextlib.suppress(OSError):  # nobody reads it
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def make_config(
    settings: ServerSettings, keys: ApiKeys | None, models: ServedModels
) -> uvicorn.Config:
    """uvicorn's, but for the sockets."""
    LimitedConnection.request_timeout_s = settings.request_timeout
    return uvicorn.Config(
        make_app(models, settings, keys),
        http=LimitedConnection,
        ws="none",
        log_config=None,
        log_level=logging.CRITICAL,  # the application logs what fails
        access_log=False,
        server_header=False,
        proxy_headers=settings.forwarded_allow_ips is not None,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=settings.drain_timeout,
    )


async def _serve(
    config: uvicorn.Config,
    models: ServedModels,
    sockets: list[socket.socket],
    say_ready: Callable[[], None],
) -> None:
    try:
        await _Server(config, say_ready).serve(sockets)
    finally:
        await models.close()


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


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    plain = logging.StreamHandler()
    access_logger.handlers = [plain]  # its lines may be JSON
    access_logger.propagate = False
    access_logger.setLevel(logging.INFO)
