"""The page in a browser, and what its scripted model says."""

import shutil

from fake_model import EOS_ID, saying

CHROMIUM = shutil.which("chromium")


def opened(browser, url, **context):
    page = browser.new_context(**context).new_page()
    page.set_default_timeout(12_000)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    return page


def words_until(ending):
    word = saying("word ")
    return lambda *args: EOS_ID if ending.is_set() else word(*args)
