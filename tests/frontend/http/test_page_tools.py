"""The page's chat with tools that the server runs, in Chromium."""

import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fake_engine import wait_until
from fake_model import TOKENIZER, saying
from http_server import serving

pytest.importorskip("mcp", reason="pip install engine-core[mcp]")

pytestmark = [pytest.mark.slow, pytest.mark.packages]

PROGRAM = f"{shlex.quote(sys.executable)} -IS {Path(__file__).with_name('tool_server.py')}"
TEMPLATE = (
    "{# <tool_call> #}{{ tools | length if tools else 0 }} tools;{% for m in messages %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}"
)
CALL = '<tool_call>\n{"name": "own__%s", "arguments": {"text": "<b>loud</b>"}}\n</tool_call>'


def prompt(request):
    return TOKENIZER.decode(request.prompt_token_ids)


def calling(*tools):
    """A model that calls the tools, one after another, and then says that it is done."""
    texts = [f"I call.{CALL % tool}" for tool in tools] + ["That was **all**."]
    tokens = [saying(text, then_eos=True) for text in texts]
    return lambda request, number: tokens[prompt(request).count("tool:")](request, number)


def ask(page, text):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")


def ended(page, text="The answer is complete."):
    page.locator("#status", has_text=text).wait_for()


@pytest.fixture
def tools_page(start_engine, open_page):
    """(names of tools that are called, options of the browser) -> the page, the engine."""
    with ExitStack() as stack:

        def start(*tools, **context):
            engine = start_engine(next_token=calling(*tools), chat_template=TEMPLATE)
            url = stack.enter_context(serving(engine.address, mcp=(f"own={PROGRAM}",)))
            listed = f"{url}/v1/mcp/servers"
            wait_until(lambda: httpx.get(listed).json()["servers"][0]["tools"], 20)
            return open_page(url, **context), engine

        yield start


def switch_on(page, *tools):
    page.get_by_role("button", name="Settings").click()
    page.locator("#tools summary", has_text="own: 9 tools").click()
    for tool in tools:
        page.get_by_role("checkbox", name=tool).check()


def shoot(page, name):
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}.png")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_call_is_shown_asked_for_and_its_result_is_told(tools_page, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page, engine = tools_page("echo", "echo", "echo", "picture", "picture", color_scheme=scheme)
    switch_on(page, "echo", "picture")
    assert page.locator("#tools input:checked").count() == 2, "the others stay off"
    found = axe.Axe().run(page).response["violations"]
    shoot(page, f"switches-{scheme}")
    page.get_by_role("button", name="Settings").click()
    ask(page, "Hello")
    ended(page, "The model wants to run own: echo. Allow it?")
    call = page.locator(".call")
    assert "<b>loud</b>" in call.locator("pre").first.inner_text()
    assert call.locator("b").count() == 0, "it is foreign text"
    assert len(engine.requests) == 1, "nothing ran"
    found += axe.Axe().run(page).response["violations"]
    shoot(page, f"asked-{scheme}")
    page.get_by_role("button", name="Allow once").click()
    page.locator(".call.done").wait_for()
    page.get_by_role("button", name="Allow in this conversation").click()
    ended(page, "The model wants to run own: picture. Allow it?")
    assert page.locator(".call.done").count() == 3, "the third one was not asked for"
    page.get_by_role("button", name="Allow once").click()
    page.locator(".call.done").nth(3).wait_for()
    page.get_by_role("button", name="Refuse").click()
    ended(page)
    assert page.locator(".assistant strong").inner_text() == "all"
    told = prompt(engine.requests[-1])
    assert told.startswith("2 tools;user:Hello;assistant:I call.;tool:<b>loud</b>;assistant:")
    assert "tool:Here it is.\n[a picture, image/png, that the user may see];" in told
    assert "tool:The user refused this call." in told
    page.reload()
    assert page.locator(".call").count() == 5, "calls are kept"
    assert page.locator(".call.refused").count() == 1
    page.locator(".call summary", has_text="own: picture").first.click()
    picture = page.locator(".call img")
    assert picture.evaluate("image => image.naturalWidth") == 1
    page.locator(".call summary", has_text="own: echo").first.click()
    found += axe.Axe().run(page).response["violations"]
    shoot(page, f"done-{scheme}")
    assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []


def test_no_tool_is_offered_before_it_is_switched_on_and_stop_ends_the_question(tools_page):
    page, engine = tools_page("echo", viewport={"width": 390, "height": 800})
    ask(page, "Hello")
    ended(page)
    assert prompt(engine.requests[0]).startswith("0 tools;")
    assert "<tool_call>" in page.locator(".assistant .body").inner_text()
    page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="New chat", exact=True).first.click()
    switch_on(page, "echo")
    shoot(page, "switches-phone")
    page.get_by_role("button", name="Settings").click()
    ask(page, "Hello")
    page.get_by_role("button", name="Allow once").wait_for()
    shoot(page, "asked-phone")
    page.get_by_role("button", name="Stop").click()
    ended(page, "Stopped.")
    assert "(not run)" in page.locator(".call summary").inner_text()
    assert page.get_by_role("button", name="Allow once").count() == 0
    ask(page, "Go on")
    ended(page)
    assert "tool:This call was not run.;user:Go on" in prompt(engine.requests[-1])
