"""A server on a port of its own, before the scripted engine."""

import asyncio
import contextlib
import dataclasses
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import uvicorn

from frontend.async_llm import AsyncLLM
from frontend.http.listeners import listening
from frontend.http.served_models import ServedModel, ServedModels
from frontend.http.server import make_config
from frontend.http.settings import ServerSettings

TEMPLATE = (
    "{# MARKERS #}{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.arguments.city }}{% endfor %};"
    "{% endfor %}"
)
"""Takes tools; MARKERS are those that a family is known by."""


@contextlib.contextmanager
def serving(address: str | Sequence[str], *names: str, **settings: object) -> Iterator[str]:
    """The URL of a server for the engine at `address`, or those at several."""
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


def key_file(folder: Path, *keys: dict[str, object], mode: int = 0o600) -> Path:
    """A file of API keys."""
    file = folder / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    file.chmod(mode)
    return file


def complete(url, prompt="Hello", headers=None, **fields):
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 5, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=20)


def events_of(response):
    """The data of server-sent events; the last one says that it is over."""
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]
