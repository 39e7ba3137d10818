"""A scripted engine at an address of the test's own, and a client of it."""

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import FakeEngine

from frontend.async_llm import AsyncLLM


@pytest.fixture
def address() -> Iterator[str]:
    # pytest's own folders are too long for a Unix socket on some systems.
    folder = tempfile.mkdtemp(prefix="fe-")
    yield f"ipc://{folder}/engine.sock"
    shutil.rmtree(folder)


@pytest.fixture
def start_engine(address: str) -> Iterator[Callable[..., FakeEngine]]:
    """Starts an engine with the given script; all of them end with the test."""
    engines: list[FakeEngine] = []

    def start(**script: object) -> FakeEngine:
        engines.append(FakeEngine(script.pop("at", address), **script).start())
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()


@pytest.fixture
def engine(start_engine: Callable[..., FakeEngine]) -> FakeEngine:
    return start_engine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(engine.address, reconnect_timeout_s=5) as llm:
        yield llm
