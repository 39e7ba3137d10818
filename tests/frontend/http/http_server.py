"""A server on a port of its own, before the scripted engine."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import uvicorn

from frontend.async_llm import AsyncLLM
from frontend.http.answer_parts import ParserNames
from frontend.http.app import make_app
from frontend.http.served_models import ServedModel, ServedModels


@contextlib.contextmanager
def serving(address: str, *names: str, **parsers: str) -> Iterator[str]:
    """The URL of a server for the engine at `address`."""
    make_client = lambda: AsyncLLM(address, connect_timeout_s=1.0, reconnect_timeout_s=5.0)  # noqa: E731
    config = uvicorn.Config(
        make_app(ServedModels([ServedModel(make_client, names)]), ParserNames(**parsers)),
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


def events_of(response):
    """The data of server-sent events; the last one says that it is over."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]
