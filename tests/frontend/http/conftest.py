"""A server before the scripted engine, and a client of it."""

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from browser_page import CHROMIUM, opened
from fake_engine import FakeEngine
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


@contextlib.contextmanager
def _client_of(engine: FakeEngine, *names: str, **settings: object) -> Iterator[httpx.Client]:
    with (
        serving(engine.address, *names, **settings) as url,
        httpx.Client(base_url=url, timeout=20) as client,
    ):
        client.engine = engine
        yield client


@pytest.fixture
def serve(start_engine) -> Iterator[Callable[..., httpx.Client]]:
    """(names, settings of the server, script of the engine) -> a client with this `engine`."""
    with contextlib.ExitStack() as servers:

        def start(*names, settings=None, **script):
            client = _client_of(start_engine(**script), *names, **(settings or {}))
            return servers.enter_context(client)

        yield start


@pytest.fixture
def serve_text(serve):
    """A client of a server whose model says a text."""

    def start(text, template=TEMPLATE, **settings):
        script = {"next_token": saying(text, then_eos=True), "chat_template": template}
        return serve(settings=settings, **script)

    return start


@pytest.fixture(scope="module")
def refusing() -> Iterator[httpx.Client]:
    """A client of one server for all requests of a file that it must refuse."""
    folder = tempfile.mkdtemp(prefix="fe-")
    with (
        FakeEngine(f"ipc://{folder}/engine.sock", chat_template=TEMPLATE) as engine,
        _client_of(engine) as client,
    ):
        yield client
    shutil.rmtree(folder)


@pytest.fixture
def http_of_refusals(refusing: httpx.Client) -> Iterator[httpx.Client]:
    """No request of the test reaches the engine."""
    yield refusing
    assert not refusing.engine.requests


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install engine-core[browser]")
    if CHROMIUM is None:
        pytest.skip("apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Its console stays free of errors."""
    problems = []

    def open_page(url, **context):
        page = opened(browser, url, **context)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda line: line.type == "error" and problems.append(line.text))
        page.reload()
        return page

    yield open_page
    assert not problems
