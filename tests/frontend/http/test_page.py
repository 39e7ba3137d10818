"""The page's files, and (in Chromium, where it is installed) what it does."""

import base64
import re
import threading

import httpx
import pytest
from browser_page import opened, words_until
from fake_engine import wait_until
from fake_model import saying
from http_server import serving

from frontend.http.page_files import FOLDER
from frontend.http.served_models import ServedModels
from frontend.http.server import Backend
from tests.frontend.multimodal.multimodal_model import INFO, PARTS_TEMPLATE, png


def test_the_page_and_what_it_names_are_served_with_a_policy(http):
    page = http.get("/", headers={"accept": "text/html"})
    assert page.headers["content-type"].startswith("text/html")
    names = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert len(names) >= 4
    names.append("page/vendor/fonts/KaTeX_Main-Regular.woff2")
    for answer in (page, *(http.get(f"/{name}") for name in names)):
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_the_base_url_leads_a_browser_to_the_page_and_tells_others_what_it_is(http):
    for path in ("/v1", "/v1/"):
        answer = http.get(path, headers={"accept": "text/html"}, follow_redirects=True)
        assert (answer.status_code, answer.url.path) == (200, "/")
        assert answer.headers["content-type"].startswith("text/html")
        answer = http.get(path)
        assert answer.status_code == 404
        assert "is the base URL of the API" in answer.json()["error"]["message"]


def test_the_icon_is_a_picture_of_the_package_and_needs_no_key(engine):
    with serving(engine.address, api_key=("secret",)) as url, httpx.Client(base_url=url) as http:
        for path in ("/favicon.ico", "/page/icon.svg"):
            answer = http.get(path)
            assert answer.headers["content-type"] == "image/svg+xml"
            assert "img-src 'self'" in answer.headers["content-security-policy"]
            assert answer.text.startswith("<svg")
        assert http.get("/v1", headers={"accept": "text/html"}).status_code == 307
        assert http.get("/v1/models").status_code == 401


def test_the_ready_text_names_the_page_where_a_browser_can_go():
    assert Backend(ServedModels([])).text("http://h:1") == (
        "Serving at http://h:1/v1; chat and scheduler for browsers: http://h:1/"
    )
    assert Backend(ServedModels([])).text("unix:///a") == "Serving at unix:///a/v1"


def test_nothing_outside_its_folder_is_served(http):
    for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd", "/page/"):
        assert http.get(path).status_code == 404


def test_the_page_loads_nothing_from_elsewhere():
    for file in [*FOLDER.glob("*.*"), *FOLDER.glob("vendor/*.css")]:
        assert not re.search(
            r"""(src|href|import|from|fetch)[=(\s]*["'](https?:)?//""", file.read_text()
        )


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
        page.get_by_role("button", name="Delete Hello").click()
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
        page.set_input_files("#files-chosen", wide)
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
        page.set_input_files("#files-chosen", files=[NO_PICTURE])
        page.get_by_text("no.png is no picture that this browser can read").wait_for()
        page.get_by_role("button", name="Remove Picture 1").click()
        page.fill("#prompt", "")
        page.get_by_role("button", name="Send").click()
        page.get_by_text("The answer is complete.").wait_for()
        assert len(engine.requests[1].multimodal_inputs) == 1


NO_PICTURE = {"name": "no.png", "mimeType": "image/png", "buffer": b"hello"}


@pytest.mark.slow
@pytest.mark.packages
def test_an_answer_cannot_run_code_or_load_anything(start_engine, browser):
    evil = (
        '<img src="/health" onerror="document.title=1"><script>document.title="owned"</script>'
        '[a](javascript:document.title="owned") <a href="https://x.example" onclick="1">b</a>'
        '<iframe src="/"></iframe><style>body{display:none}</style><form action="/"></form>'
        "\n\n```html\n<img src=x onerror='document.title=2'><script>1</script>\n```\n\n"
        r"$\href{javascript:document.title=4}{a}$ $\includegraphics{/health}$ $x^2$"
        "\n\n<code data-math='inline'>\\htmlStyle{color: red}{y}</code>"
        '\n\n```x"onmouseover="document.title=5\nz\n```\n'
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
        assert "<script>" in body.locator(".code pre").first.inner_text()
        assert body.locator(".code .hljs-tag").count() > 0
        assert body.locator(".katex").count() >= 1
        assert body.locator("[style*=red], [onmouseover]").count() == 0


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
        wait_until(lambda: engine.num_live == 0, 10)


def mark(page, title):
    return page.locator("#conversations li", has_text=title).locator(".mark")


@pytest.mark.slow
@pytest.mark.packages
def test_answers_of_several_conversations_go_on_while_another_is_shown(start_engine, open_page):
    ending = threading.Event()
    engine = start_engine(next_token=words_until(ending), step_s=0.02)
    with serving(engine.address) as url:
        page = open_page(url)
        new = page.get_by_role("button", name="New chat", exact=True).first
        for title in ("First", "Second"):
            new.click()
            page.fill("#prompt", title)
            page.keyboard.press("Enter")
            page.get_by_text("Answering.").wait_for()
        assert engine.num_live == 2
        new.click()
        assert page.inner_text("#send") == "Send", "nothing is written here"
        for title in ("First", "Second"):
            assert mark(page, title).get_attribute("class") == "mark answering"
        assert "word" not in page.inner_text("#messages")
        page.locator("#conversations button", has_text="First").first.click()
        assert page.inner_text("#send") == "Stop"
        assert "word word" in page.inner_text(".assistant .body")
        ending.set()
        page.locator("#conversations .mark.new").wait_for()
        page.locator("#send", has_text="Send").wait_for()
        assert mark(page, "First").count() == 0
        page.wait_for_function("() => document.getElementById('status').textContent === ''")
        page.locator("#conversations button", has_text="Second").first.click()
        assert "word word" in page.inner_text(".assistant .body")
        assert "tokens/s" in page.inner_text(".assistant .under")
        assert page.locator(".mark").count() == 0


@pytest.mark.slow
@pytest.mark.packages
def test_a_deleted_conversation_ends_its_answer_alone_and_comes_back(start_engine, open_page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    engine = start_engine(next_token=saying("word "), step_s=0.02)
    with serving(engine.address) as url:
        page = open_page(url)
        for title in ("First", "Second"):
            page.get_by_role("button", name="New chat", exact=True).first.click()
            page.fill("#prompt", title)
            page.keyboard.press("Enter")
            page.get_by_text("Answering.").wait_for()
        page.get_by_role("button", name="Delete First").click()
        wait_until(lambda: engine.num_live == 1, 10)
        assert page.inner_text("#send") == "Stop", "the other one goes on"
        page.get_by_role("button", name="Delete Second").click()
        wait_until(lambda: engine.num_live == 0, 10)
        found = axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found] == []
        for title in ("Second", "First"):
            page.get_by_role("button", name=f"bring back “{title}”").click()
            assert page.inner_text(".user .body") == title
            assert "word" in page.inner_text(".assistant .body")
            assert "stopped" in page.inner_text(".assistant .under")
        assert not page.locator("#undo").is_visible()
        page.get_by_role("button", name="Regenerate").click()
        page.get_by_text("Answering.").wait_for()
        page.get_by_role("button", name="Edit").click()
        page.get_by_text("stop it first").wait_for()
        page.get_by_role("button", name="Stop").click()
        wait_until(lambda: engine.num_live == 0, 10)


@pytest.mark.slow
@pytest.mark.packages
def test_a_setting_beyond_its_bounds_is_told_and_not_sent(start_engine, open_page):
    engine = start_engine(next_token=saying("word", then_eos=True))
    with serving(engine.address) as url:
        page = open_page(url)
        page.locator("#attach[title='Text files']").wait_for()  # this model takes no pictures
        data = base64.b64encode(png()).decode()
        page.evaluate(PASTE, ["#prompt", "paste", "clipboardData", data])
        page.get_by_text("red.png is a picture, and this model takes none").wait_for()
        for field, value, told in (
            ("#temperature", "9", "Temperature is 9; give a number from 0 to 2"),
            ("#top_k", "-1", "Top k is -1; give a whole number of at least 0"),
            ("#max_tokens", "1.5", "Most tokens is 1.5; give a whole number of at least 1"),
        ):
            page.evaluate("document.getElementById('settings').hidden = false")
            page.fill(field, value)
            page.evaluate("document.getElementById('settings').hidden = true")
            ask(page, "Hello", told)
            assert page.locator(field).is_visible()
            assert page.input_value("#prompt") == "Hello"
            page.fill(field, "")
        assert engine.requests == []
        page.fill("#temperature", "1.25")
        ask(page, "Hello")
        assert engine.requests[0].sampling_params.temperature == 1.25


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
        page.get_by_role("button", name="Menu").click()
        found += axe.Axe().run(page).response["violations"]
        page.get_by_role("button", name="Keyboard shortcuts").click()
        found += axe.Axe().run(page).response["violations"]
        assert [each["id"] for each in found] == []
        assert (
            page.evaluate_handle("document.documentElement")
            .get_property("scrollWidth")
            .json_value()
            <= width
        )
