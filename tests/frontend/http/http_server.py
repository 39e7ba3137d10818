"""A server on a port of its own, before the scripted engine."""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import uvicorn

from frontend.async_llm import AsyncLLM
from frontend.http.listeners import listening
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.server import make_config
from frontend.http.settings import ServerSettings


@contextlib.contextmanager
<<<<<<< HEAD
def serving(address: str, *names: str, **options) -> Iterator[str]:
    """The URL of a server for the engine at `address`."""
    make_client = lambda: AsyncLLM(address, connect_timeout_s=1.0, reconnect_timeout_s=5.0)  # noqa: E731
    config = uvicorn.Config(
        make_app(ServedModels([ServedModel(make_client, names)]), **options),
        port=0,
        log_level="warning",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()
=======
def serving(address: str, *names: str, **settings: object) -> Iterator[str]:
    """The URL of a server for the engine at `address`."""
    make_client = lambda: AsyncLLM(address, connect_timeout_s=1.0, reconnect_timeout_s=5.0)  # noqa: E731
    with serving_models(ServedModels([ServedModel(make_client, names)]), **settings) as url:
        yield url


@contextlib.contextmanager
def serving_models(models: ServedModels, **settings: object) -> Iterator[str]:
    """The URL of a server for these models."""
    chosen = dataclasses.replace(ServerSettings(port=0), **settings)
    server = uvicorn.Server(make_config(chosen, chosen.check(), models))
    with listening(chosen) as (url, sockets):
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets)), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
        yield url
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
>>>>>>> main
