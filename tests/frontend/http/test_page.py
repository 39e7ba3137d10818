"""The page's files, and (in Chromium, where it is installed) what it does."""

import base64
import re
import shutil
import time

import pytest
from fake_model import saying
from http_server import serving

from frontend.http.page_files import FOLDER
from tests.frontend.multimodal.multimodal_model import INFO, PARTS_TEMPLATE, png

CHROMIUM = shutil.which("chromium")


def test_the_page_and_what_it_names_are_served_with_a_policy(http):
    page = http.get("/", headers={"accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html")
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(names) >= 4
    for answer in (page, *(http.get(f"/{name}") for name in names)):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_nothing_outside_its_folder_is_served(http):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/"):
        assert http.get(path).status_code == 404


def test_the_page_loads_nothing_from_elsewhere():
    for file in FOLDER.glob("*.*"):
        assert not re.search(
            r"""(src|href|import|from|fetch)[=(\s]*["'](https?:)?//""", file.read_text()
        )


@pytest.fixture
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install engine-core[browser]")
    if CHROMIUM is None:
        pytest.skip("apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, url, **context):
    page = browser.new_context(**context).new_page()
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    return page


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


def ask(page, text, status="The answer is complete."):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.get_by_text(status).wait_for()


@pytest.mark.slow
@pytest.mark.packages
def test_a_conversation_is_written_formatted_and_kept(start_engine, open_page):
    engine = start_engine(next_token=saying("a **bold** word\n\n- one\n- two\n", then_eos=True))
    with serving(engine.address) as url:
        page = open_page(url)
        ask(page, "Hello <b>you</b>")
        assert page.inner_text(".user .body") == "Hello <b>you</b>"
        assert page.inner_text(".assistant .body strong") == "bold"
        assert page.locator(".assistant .body li").count() == 2
        assert "tokens/s" in page.inner_text(".assistant .under")
        page.reload()
        assert page.inner_text(".assistant .body strong") == "bold"
        ask(page, "And again")
        assert page.locator("article").count() == 4
        page.get_by_role("button", name="Retry").last.click()
        page.get_by_text("The answer is complete.").wait_for()
        assert page.locator("article").count() == 4
        page.get_by_role("button", name="Edit").first.click()
        assert page.input_value("#prompt") == "Hello <b>you</b>"
        assert page.locator("article").count() == 0
        page.get_by_role("button", name="Delete").click()
        assert page.locator("#conversations li").count() <= 1


PASTE = """async ([target, kind, field, base64]) => {
  const data = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([data], "red.png", { type: "image/png" }));
  const fields = { bubbles: true, cancelable: true, [field]: transfer };
  const made = kind === "paste" ? new ClipboardEvent(kind, fields) : new DragEvent(kind, fields);
  document.querySelector(target).dispatchEvent(made);
}"""


@pytest.mark.slow
@pytest.mark.packages
def test_pictures_are_chosen_pasted_and_dropped_shown_and_sent(start_engine, open_page, tmp_path):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    engine = start_engine(
        next_token=saying("red", then_eos=True), multimodal=INFO, chat_template=PARTS_TEMPLATE
    )
    wide = tmp_path / "wide.png"
    wide.write_bytes(png("red", (2000, 10)))
    with serving(engine.address) as url:
        page = open_page(url)
        data = base64.b64encode(png()).decode()
        page.evaluate(PASTE, ["#prompt", "paste", "clipboardData", data])
        page.evaluate(PASTE, ["main", "drop", "dataTransfer", data])
        page.locator("#attached li").nth(1).wait_for()
        page.set_input_files("#pictures-chosen", wide)
        page.locator("#attached li").nth(2).wait_for()
        page.get_by_role("button", name="Remove Picture 2").click()
        found = axe.Axe().run(page).response["violations"]
        ask(page, "What is it?")
        assert page.locator(".user .body img[alt^=Picture]").count() == 2
        assert page.locator("#attached li").count() == 0
        assert len(engine.requests[0].multimodal_inputs) == 2
        page.reload()
        first, scaled = page.locator(".user .body img").all()
        assert scaled.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [1280, 6]
        assert first.evaluate("image => image.src").endswith(data)
        found += axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
        page.get_by_role("button", name="Edit").first.click()
        assert page.locator("#attached li").count() == 2
        page.set_input_files("#pictures-chosen", files=[NO_PICTURE])
        page.get_by_text("no.txt is no picture that this browser can read").wait_for()
        page.get_by_role("button", name="Remove Picture 1").click()
        page.fill("#prompt", "")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("The answer is complete.").wait_for()
        assert len(engine.requests[1].multimodal_inputs) == 1


NO_PICTURE = {"name": "no.txt", "mimeType": "text/plain", "buffer": b"hello"}


@pytest.mark.slow
@pytest.mark.packages
def test_an_answer_cannot_run_code_or_load_anything(start_engine, browser):
    evil = (
        '<img src="/health" onerror="document.title=1"><script>document.title="owned"</script>'
        '[a](javascript:document.title="owned") <a href="https://x.example" onclick="1">b</a>'
        '<iframe src="/"></iframe><style>body{display:none}</style><form action="/"></form>'
    )
    engine = start_engine(next_token=saying(evil, then_eos=True))
    with serving(engine.address) as url:
        page = opened(browser, url)
        ask(page, "Hello")
        assert page.title() == "engine-core"
        body = page.locator(".assistant .body")
        assert body.locator("img, script, iframe, style, form, [onclick], [onerror]").count() == 0
        links = [link.get_attribute("href") for link in body.locator("a").all()]
        assert "https://x.example" in links
        assert not any("javascript" in (link or "") for link in links)


@pytest.mark.slow
@pytest.mark.packages
def test_stop_ends_the_request_and_keeps_what_came(start_engine, open_page):
    engine = start_engine(next_token=saying("word "), step_s=0.02)
    with serving(engine.address) as url:
        page = open_page(url)
        page.fill("#prompt", "Hello")
        page.keyboard.press("Enter")
        page.get_by_text("Answering.").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        assert "word" in page.inner_text(".assistant .body")
        deadline_s = time.monotonic() + 10
        while engine.num_live:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.packages
def test_a_refusal_is_shown_with_its_reason(engine, browser):
    with serving(engine.address) as url:
        page = opened(browser, url)  # a 400 is an error of the console, too
        page.fill("#prompt", "x" * 600)
        page.keyboard.press("Enter")
        page.get_by_text("The answer failed.").wait_for()
        assert "the limit is 511" in page.inner_text(".assistant .error")


@pytest.mark.slow
@pytest.mark.packages
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_axe_finds_nothing_serious(start_engine, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    engine = start_engine(
        next_token=saying("# Title\n\n`code` and a [link](https://x.example)", then_eos=True)
    )
    with serving(engine.address) as url:
        page = open_page(url, color_scheme=scheme, viewport={"width": width, "height": 800})
        page.get_by_role("button", name="Settings").click()
        ask(page, "Hello")
        found = axe.Axe().run(page).response["violations"]
        if width < 1000:
            page.get_by_role("button", name="Scheduler").click()
            page.get_by_text("The engine is").wait_for()
        found += axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found if each["impact"] in ("serious", "critical")] == []
        assert (
            page.evaluate_handle("document.documentElement")
            .get_property("scrollWidth")
            .json_value()
            <= width
        )


@pytest.mark.slow
@pytest.mark.packages
def test_the_view_moves_while_a_request_runs_and_says_when_the_engine_is_away(
    start_engine, address, open_page
):
    engine = start_engine(next_token=saying("word "), step_s=0.02)
    with serving(address, "small") as url:
        page = open_page(url, viewport={"width": 1400, "height": 900})
        page.get_by_text("The engine is idle.").wait_for()
        page.fill("#prompt", "Hello")
        page.keyboard.press("Enter")
        page.get_by_text("The engine is at work.").wait_for()
        page.locator("#lane-running .card").wait_for()
        before = page.evaluate("document.getElementById('steps').toDataURL()")
        assert page.inner_text("#figure-running") == "1"
        assert "16 prompt tokens of #1" in page.inner_text("#steps-text")
        page.wait_for_function(
            "text => document.getElementById('steps-text').textContent !== text",
            arg=page.inner_text("#steps-text"),
        )
        assert page.evaluate("document.getElementById('steps').toDataURL()") != before
        page.get_by_text("The last steps as a table").click()
        page.locator("#steps-rows tr").first.wait_for()
        page.get_by_role("button", name="Pause").click()
        text = page.inner_text("#steps-text")
        page.wait_for_timeout(300)
        assert page.inner_text("#steps-text") == text
        page.get_by_role("button", name="Go on").click()
        engine.stop()
        page.get_by_text("The engine is away").wait_for()
        start_engine(next_token=saying("word "))
        page.get_by_text(re.compile("The engine is (at work|idle)")).wait_for()


@pytest.mark.slow
@pytest.mark.packages
def test_a_closed_view_asks_for_nothing_and_on_a_phone_chat_and_view_are_tabs(engine, open_page):
    with serving(engine.address) as url:
        page = open_page(url, viewport={"width": 390, "height": 800})
        page.wait_for_timeout(300)
        assert engine.num_watched == 0
        chat, view = page.locator("main"), page.locator("#view")
        assert chat.is_visible() and not view.is_visible()
        page.get_by_role("button", name="Scheduler").click()
        page.get_by_text("The engine is idle.").wait_for()
        assert view.is_visible() and not chat.is_visible()
        page.get_by_role("button", name="Chat", exact=True).click()
        assert chat.is_visible() and not view.is_visible()
        page.wait_for_timeout(300)
        num_asked = engine.num_watched
        page.wait_for_timeout(300)
        assert engine.num_watched == num_asked > 0


@pytest.mark.slow
@pytest.mark.packages
def test_reduced_motion_moves_nothing(start_engine, open_page):
    engine = start_engine(next_token=saying("word "), step_s=0.02)
    with serving(engine.address) as url:
        page = open_page(url, viewport={"width": 1400, "height": 900}, reduced_motion="reduce")
        page.fill("#prompt", "Hello")
        page.keyboard.press("Enter")
        page.locator("#lane-running .card").wait_for()
        drawn = "(window.drawn = 0, new MutationObserver(() => drawn++).observe(" + (
            "document.getElementById('steps-text'), {childList: true}))"
        )
        page.evaluate(drawn)
        page.wait_for_timeout(2200)
        assert 1 <= page.evaluate("drawn") <= 4, "once a second, whatever comes"
        assert page.evaluate("document.getAnimations().length") == 0
        page.get_by_role("button", name="Stop").click()
