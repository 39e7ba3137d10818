"""A server before the scripted engine, and a client of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from http_server import serving


@pytest.fixture
def url(engine) -> Iterator[str]:
    with serving(engine.address) as url:
        yield url


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client
