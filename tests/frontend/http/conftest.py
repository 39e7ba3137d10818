"""A server before the scripted engine, and a client of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_model import saying
from http_server import TEMPLATE, serving


@pytest.fixture
def url(engine) -> Iterator[str]:
    with serving(engine.address) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def serve_text(start_engine):
    """A client of a server whose model says a text."""
    contexts = []

    def start(text, template=TEMPLATE, **options):
        engine = start_engine(next_token=saying(text, then_eos=True), chat_template=template)
        server = serving(engine.address, **options)
        contexts.append(server)
        http = httpx.Client(base_url=server.__enter__(), timeout=20)
        http.engine = engine
        return http

    yield start
    for server in contexts:
        server.__exit__(None, None, None)
