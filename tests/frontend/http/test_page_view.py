"""The page's view of the scheduler, in Chromium where it is installed."""

import re
import threading

import httpx
import pytest
from browser_page import words_until
from fake_model import saying
from http_server import serving, serving_models

from frontend.async_llm import AsyncLLM
from frontend.http.served_models import ServedModel, ServedModels

pytestmark = [pytest.mark.slow, pytest.mark.packages]


def test_sixteen_requests_look_different_and_three_digits_stay_on_a_line(start_engine, open_page):
    ending = threading.Event()
    engine = start_engine(next_token=words_until(ending), step_s=0.05)
    with serving(engine.address) as url:
        page = open_page(url, viewport={"width": 1400, "height": 900})
        body = {"prompt": "x" * 99, "max_tokens": 400}
        page.get_by_text("The engine is idle.").wait_for()
        top = "document.getElementById('lanes-box').getBoundingClientRect().top"
        idle = page.evaluate(top)
        with httpx.Client(timeout=60) as http:
            send = lambda: http.post(f"{url}/v1/completions", json=body)  # noqa: E731
            threads = [threading.Thread(target=send, daemon=True) for _ in range(16)]
            for thread in threads:
                thread.start()
            page.locator(".card").nth(15).wait_for()
            looks = page.evaluate(
                "[...document.querySelectorAll('.card .dot')].map((dot) => getComputedStyle(dot))"
                ".map((style) => style.backgroundColor + style.backgroundImage)"
            )
            assert len(set(looks)) == 16
            before, after = page.locator(".card").first.evaluate(
                """(card) => {
                  const before = card.offsetHeight;
                  card.querySelector('.name').textContent = '#128';
                  card.querySelector('.doing').textContent = '128/400';
                  return [before, card.offsetHeight];
                }"""
            )
            assert before == after
            assert page.evaluate(top) == idle, "nothing above has moved"
            page.get_by_role("button", name="shared").hover()
            assert "texts begin alike" in page.inner_text("#blocks-text")
            page.locator("#steps").focus()
            page.keyboard.press("ArrowLeft")
            told = page.inner_text("#steps-text")
            page.wait_for_timeout(200)
            assert page.inner_text("#steps-text") == told, "it stays at the step"
            page.locator("#blocks").focus()
            page.keyboard.press("ArrowRight")
            assert page.inner_text("#blocks-text").startswith("Block 1:")
            ending.set()
            for thread in threads:
                thread.join(20)


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
        page.get_by_text("as a table").click()
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


def test_of_several_models_the_view_shows_that_of_the_chat(engine, open_page):
    def client():
        return AsyncLLM(engine.address, connect_timeout_s=1.0, reconnect_timeout_s=5.0)

    models = ServedModels([ServedModel(client, (name,)) for name in ("one", "two")])
    with serving_models(models) as url:
        page = open_page(url)
        page.get_by_text("The engine is idle.").wait_for()
        shown = page.locator("#engine option:checked")
        assert shown.inner_text() == "one"
        page.select_option("#model", "two")
        assert shown.inner_text() == "two"
        page.reload()
        page.get_by_text("The engine is idle.").wait_for()
        assert shown.inner_text() == page.input_value("#model")


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
