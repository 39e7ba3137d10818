"""What the page keeps of chats: versions, files, settings, exports, answers of another visit."""

import json
import threading
from pathlib import Path

import pytest
from browser_page import opened, words_until
from fake_engine import wait_until
from fake_model import EOS_ID, TOKENIZER, saying
from http_server import serving

pytestmark = [pytest.mark.slow, pytest.mark.packages]


def ask(page, text):
    page.fill("#prompt", text)
    page.keyboard.press("Enter")
    page.locator("#status", has_text="The answer is complete.").wait_for()


def said(page):
    return page.locator(".message .body").all_inner_texts()


def test_edited_questions_and_new_answers_are_versions_that_stay_reachable(start_engine, open_page):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    made = []

    def counting(request, number):
        if request.request_id not in made:
            made.append(request.request_id)
        text = f"answer {made.index(request.request_id) + 1}"
        return saying(text, then_eos=True)(request, number)

    engine = start_engine(next_token=counting)
    with serving(engine.address) as url:
        page = open_page(url)
        page.get_by_role("button", name="Explain what a KV cache is").click()
        page.locator("#status", has_text="The answer is complete.").wait_for()
        ask(page, "Two")
        page.get_by_role("button", name="Regenerate").last.click()
        page.get_by_text("answer 3").wait_for()
        page.locator("#send", has_text="Send").wait_for()
        versions = page.get_by_role("group", name="Versions")
        assert "2/2" in versions.inner_text()
        page.keyboard.press("ArrowUp")
        assert page.input_value("#prompt") == "Two"
        page.keyboard.press("Escape")
        assert (page.input_value("#prompt"), len(said(page))) == ("", 4)
        page.get_by_role("button", name="Edit").first.click()
        ask(page, "One anew")
        assert said(page) == ["One anew", "answer 4"]
        page.reload()
        assert said(page) == ["One anew", "answer 4"]
        versions.get_by_role("button", name="Version before").click()
        assert said(page)[2:] == ["Two", "answer 3"]
        versions.last.get_by_role("button", name="Version before").click()
        assert said(page)[3] == "answer 2"
        assert [each["id"] for each in axe.Axe().run(page).response["violations"]] == []
        ask(page, "Three")
        assert [each for each in said(page) if "answer" in each] == [
            "answer 1",
            "answer 2",
            "answer 5",
        ]
        assert "tokens" in page.inner_text("#context")


def file(name, data, kind="text/plain"):
    return {"name": name, "mimeType": kind, "buffer": data}


def test_text_files_go_with_a_question_and_others_are_refused_with_a_reason(
    start_engine, open_page
):
    engine = start_engine(next_token=saying("read", then_eos=True))
    with serving(engine.address) as url:
        page = open_page(url)
        evil = '<img src=x onerror="document.title=1">.md'
        for name, data, told in (
            ("a.pdf", b"%PDF-1.7", "a.pdf is a PDF, which models cannot read"),
            ("a.bin", b"\xff\xfe\x00", "a.bin is neither text in UTF-8 nor a picture"),
            ("a.txt", b"x" * 200_001, "a.txt has 200,001 characters, the limit is 200,000"),
        ):
            page.set_input_files("#files-chosen", files=[file(name, data)])
            page.locator("#status", has_text=told).wait_for()
        page.set_input_files("#files-chosen", files=[file(evil, b"a ```fence``` <b>in</b> it\n")])
        page.get_by_role("button", name=f"Remove {evil}").wait_for()
        ask(page, "What is it?")
        prompt = TOKENIZER.decode(engine.requests[0].prompt_token_ids)
        assert f"File {evil}:\n````\na ```fence``` <b>in</b> it\n````\n\nWhat is it?" in prompt
        page.reload()
        page.locator(".user .file summary", has_text=evil).click()
        assert "<b>in</b>" in page.inner_text(".user .file pre")
        assert (page.title(), page.locator(".user img").count()) == ("engine-core", 0)


def downloaded(page, name):
    page.get_by_role("button", name="Menu").click()
    with page.expect_download() as download:
        page.get_by_role("button", name=name).click()
    page.keyboard.press("Escape")
    return download.value


def imported(page, path):
    page.set_input_files("#import-chosen", path)
    page.locator("#status", has_text=Path(path).name).wait_for()


def test_chats_are_found_renamed_exported_and_imported(start_engine, open_page, tmp_path):
    engine = start_engine(next_token=saying("a **bold** word", then_eos=True))
    with serving(engine.address) as url:
        page = open_page(url)
        ask(page, "Tell of <i>whales</i>")
        page.keyboard.press("F2")
        page.keyboard.type("Sea <b>life</b>")
        page.keyboard.press("Tab")
        page.get_by_role("button", name="New chat", exact=True).first.click()
        ask(page, "Of mountains")
        page.keyboard.press("Control+K")
        page.keyboard.type("WHALES")
        assert page.locator("#conversations li").count() == 1
        page.locator("#conversations button").first.click()
        assert said(page)[0] == "Tell of <i>whales</i>"
        page.fill("#search", "")
        for name, ending in (("this chat as Markdown", "md"), ("this chat as JSON", "json")):
            path = tmp_path / f"one.{ending}"
            downloaded(page, name).save_as(path)
            before = page.locator("#conversations li").count()
            imported(page, path)
            assert page.locator("#conversations li").count() == before + 1
            assert page.input_value("#title") == "Sea <b>life</b>"
            assert said(page) == ["Tell of <i>whales</i>", "a bold word"]
        everything = json.loads(Path(downloaded(page, "all chats").path()).read_text())
        assert len(everything["conversations"]) == 4
        foreign = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
        for name, text, told in (
            ("openai.json", json.dumps({"messages": foreign}), "1 chat is here"),
            ("a.json", "{", "it is neither JSON nor Markdown that this page exported"),
            ("b.json", '{"messages": [{"role": "robot", "content": ""}]}', "is of role robot"),
            ("c.json", '{"messages": [{"role": "user", "content": "", "parent": 7}]}', "follows"),
        ):
            (tmp_path / name).write_text(text)
            imported(page, tmp_path / name)
            assert told in page.inner_text("#status")
        assert page.input_value("#system") == "Be short."


def test_an_answer_goes_on_while_the_page_is_away_and_is_read_on(start_engine, open_page):
    ending = threading.Event()
    engine = start_engine(next_token=words_until(ending), step_s=0.02)
    with serving(engine.address) as url:
        page = open_page(url)
        page.fill("#prompt", "Long")
        page.keyboard.press("Enter")
        page.get_by_text("Answering.").wait_for()
        page.goto("about:blank")
        page.wait_for_timeout(300)
        assert engine.num_live == 1
        page.goto(url)
        page.locator("#send", has_text="Stop").wait_for()
        count = "document.querySelector('.assistant .content').textContent.split('word').length"
        page.wait_for_function(f"() => {count} > 20")
        page.reload()
        page.wait_for_timeout(300)
        ending.set()
        page.locator("#status", has_text="The answer is complete.").wait_for()
        words = page.inner_text(".assistant .content").split()[:-1]  # the last one is cut
        assert words == ["word"] * len(words), "no part is lost or comes twice"
        assert len(engine.requests) == 1
        page.get_by_role("button", name="Regenerate").click()
        page.locator("#send", has_text="Send").wait_for()
        wait_until(lambda: engine.num_live == 0, 10)


def test_a_chat_that_two_tabs_show_keeps_what_each_of_them_asks(start_engine, open_page):
    engine = start_engine(next_token=saying("read", then_eos=True))
    with serving(engine.address) as url:
        page = open_page(url)
        ask(page, "One")
        other = page.context.new_page()
        other.goto(url)
        ask(other, "Two")
        page.get_by_text("Two").wait_for()
        ask(page, "Three")
        page.reload()
        assert said(page)[::2] == ["One", "Two", "Three"]


def test_settings_are_those_of_a_chat_and_presets_carry_them_over(start_engine, browser):
    engine = start_engine(next_token=lambda *_: EOS_ID)
    with serving(engine.address) as url:
        page = opened(browser, url)  # a 404 is an error of the console, too
        page.get_by_role("button", name="Settings").click()
        page.fill("#temperature", "0.5")
        page.fill("#system", "Be kind.")
        page.fill("#preset", "kind")
        page.get_by_role("button", name="Save").click()
        ask(page, "First")
        page.get_by_role("button", name="New chat", exact=True).first.click()
        page.fill("#temperature", "1.5")
        ask(page, "Second")
        page.locator("#conversations button", has_text="First").first.click()
        assert page.input_value("#temperature") == "0.5"
        page.locator("#conversations button", has_text="Second").first.click()
        assert page.input_value("#temperature") == "1.5"
        page.reload()
        page.get_by_role("button", name="Settings").click()
        page.fill("#preset", "kind")
        page.keyboard.press("Tab")
        assert page.input_value("#temperature") == "0.5"
        page.fill("#fetched", "nobody/knows-it")
        page.get_by_role("button", name="Fetch").click()
        page.locator("#status", has_text="nobody/knows-it was not fetched").wait_for()
        page.get_by_role("button", name="Menu").click()
        page.get_by_label("Theme").select_option("dark")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(20, 22, 26)"
        )
        page.get_by_role("button", name="Keyboard shortcuts").click()
        assert page.get_by_role("dialog").is_visible()
        assert [each.sampling_params.temperature for each in engine.requests] == [0.5, 1.5]
