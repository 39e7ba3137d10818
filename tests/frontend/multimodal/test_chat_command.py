"""`engine-client chat` with pictures, against a scripted engine."""

import io
import json
import sys

import pytest
from fake_model import ids_of, saying
from multimodal_model import INFO, NUM_TOKENS, PARTS_TEMPLATE, png

from frontend.cli.app import run_command_line


@pytest.fixture
def chat(start_engine, address, monkeypatch, tmp_path):
    (tmp_path / "red.png").write_bytes(png())
    monkeypatch.chdir(tmp_path)

    def run(text, *options, **script):
        engine = start_engine(
            **{"multimodal": INFO, "chat_template": PARTS_TEMPLATE, **script},
            next_token=saying("yes", then_eos=True),
        )
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return run_command_line(["chat", "--address", address, *options]), engine

    return run


def test_pictures_go_with_the_first_and_with_a_later_message(chat, tmp_path):
    text = "one\ntwo\n/image red.png\nthree\n/save all.json\n/save all.md\n"
    code, engine = chat(text, "--image", "red.png")
    assert code == 0
    image = [257] * NUM_TOKENS
    first = [*ids_of("user:"), *image, *ids_of("one;")]
    assert engine.requests[0].prompt_token_ids == first
    second = [*first, *ids_of("assistant:yes;user:two;")]
    assert engine.requests[1].prompt_token_ids == second
    last = [*second, *ids_of("assistant:yes;user:"), *image, *ids_of("three;")]
    assert engine.requests[2].prompt_token_ids == last
    assert [len(each.multimodal_inputs) for each in engine.requests] == [1, 1, 2]
    kept = json.loads((tmp_path / "all.json").read_text())
    assert kept[0]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert "## user\n\n[picture]\n\none\n" in (tmp_path / "all.md").read_text()


def test_a_picture_that_is_not_there_is_named(chat, capsys):
    code, _ = chat("/image\n")
    assert code == 1
    assert "/image needs the name of a FILE" in capsys.readouterr().err
    code, engine = chat("one\n", "--image", "green.png")
    assert code == 2
    assert "--image: " in (told := capsys.readouterr().err) and "green.png" in told
    assert not engine.requests


def test_a_model_of_texts_is_named_and_clear_forgets_the_picture(chat, capsys):
    code, engine = chat("one\n", "--image", "red.png", multimodal=None)
    assert code == 1
    told = capsys.readouterr().err
    assert "model 'fake' takes text only" in told and told.endswith("; /clear starts over\n")
    assert not engine.requests
    assert chat("/clear\ntwo\n", "--image", "red.png", multimodal=None)[0] == 0
