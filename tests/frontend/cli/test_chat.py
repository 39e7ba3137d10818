"""`engine-client chat` from a pipe against a scripted engine."""

import io
import os
import sys

import pytest
from fake_model import ids_of, saying

from frontend.cli.app import run_command_line
from protocol.presets import Preset, PresetMessage, write_preset
from protocol.running_daemons import RunningDaemon, listed


@pytest.fixture
def chat(address, monkeypatch, capsys):
    def run(text, *options):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        code = run_command_line(["chat", "--address", address, *options])
        return code, *capsys.readouterr()

    return run


def test_turns_from_a_pipe_are_answered_in_order_with_the_history(start_engine, chat):
    engine = start_engine(next_token=saying("yes", then_eos=True))
    assert chat("one\n\ntwo\n", "--system", "S") == (0, "yes\nyes\n", "")
    assert [request.prompt_token_ids for request in engine.requests] == [
        ids_of("system:S;user:one;"),
        ids_of("system:S;user:one;assistant:yes;user:two;"),
    ]


def test_clear_forgets_the_turns_and_keeps_the_system_message(start_engine, chat):
    engine = start_engine(next_token=saying("yes", then_eos=True))
    code, out, _ = chat("one\n/clear\ntwo\n/exit\nthree\n", "--system", "S")
    assert (code, out) == (0, "yes\nyes\n")
    assert engine.requests[-1].prompt_token_ids == ids_of("system:S;user:two;")


def test_a_presets_system_message_is_shown_and_removed(start_engine, chat, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    engine = start_engine(next_token=saying("yes", then_eos=True), chat_template=None)
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    said = [PresetMessage("user", "a"), PresetMessage("assistant", "b")]
    write_preset("mario", Preset(from_="x", system="S", template=template, messages=said))
    lines = "one\n/system\n/system -\n/clear\ntwo\n"
    code, out, err = chat(lines, "--preset", "mario")
    assert (code, out) == (0, "yes\nyes\n")
    assert "system message: S\nsystem message: none\n" in err
    prompts = [request.prompt_token_ids for request in engine.requests]
    assert prompts == [ids_of("<S><a><b><one>"), ids_of("<a><b><two>")]
    code, _, err = chat("one\n", "--preset", "luigi")
    assert (code, "--preset: there is no 'luigi'" in err) == (2, True)


def test_load_goes_on_with_what_another_name_serves_and_keeps_what_was_set(
    start_engine, chat, address, monkeypatch, tmp_path
):
    for name in ("XDG_RUNTIME_DIR", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    engine = start_engine(next_token=saying("yes", then_eos=True))
    write_preset("mario", Preset(from_="tiny", system="S"))
    write_preset("own", Preset(from_="tiny", adapter="/x"))
    daemon = RunningDaemon(pid=os.getpid(), model="T", asked="tiny", address=address, files="")
    lines = "one\n/set top_k 3\n/model\n/load mario\n/show\ntwo\n"
    with listed(daemon):
        code, out, err = chat(lines)
        assert (code, out, f"* tiny  {address}\n" in err) == (0, "yes\nyes\n", True)
        assert {"preset of     tiny", "system        S", "conversation  2 messages"} <= {
            *err.splitlines()
        }
        assert engine.requests[-1].sampling_params.top_k == 3
        prompt = ids_of("system:S;user:one;assistant:yes;user:two;")
        assert engine.requests[-1].prompt_token_ids == prompt
        for name, said in {
            "luigi": "none of your daemons serves luigi",
            "own": "an adapter",
        }.items():
            code, _, err = chat(f"/load {name}\n")
            assert (code, said in err, f"`engine-client run {name}`" in err) == (1, True, True)


def test_unknown_command_is_named(start_engine, chat):
    start_engine()
    code, out, err = chat("/cleer\n")
    assert (code, out) == (1, "")
    assert "no command /cleer" in err


def test_too_long_history_says_how_long_and_what_to_do(start_engine, chat):
    start_engine(next_token=saying("yes", then_eos=True))
    code, out, err = chat("one\n" + "x" * 600 + "\n")
    assert (code, out) == (1, "yes\n")
    assert "the limit is 511 (max_model_len 512 less one" in err
    assert err.endswith("; /clear starts over\n")


def test_engine_that_dies_in_an_answer_is_reported_in_one_line(start_engine, chat):
    start_engine(next_token=saying("tick "), die_after_tokens=10)
    code, out, err = chat("Hi\n", "--reconnect-timeout", "0.2")
    assert (code, out, err.count("\n")) == (1, "tick tick \n", 1)
    assert err.startswith("engine-client: ")
    assert "is gone" in err


def test_commands_from_a_pipe_answer_on_stderr_and_a_wrong_one_ends_the_chat(
    start_engine, chat, tmp_path
):
    engine = start_engine(next_token=saying("yes", then_eos=True))
    file = tmp_path / "talk.json"
    lines = [
        "/set parameter temperature 0",
        "/set system S",
        "one",
        f"/save {file}",
        "/set top_p 2",
        "two",
    ]
    code, out, err = chat("\n".join(lines) + "\n")
    assert (code, out) == (1, "yes\n")
    assert err.startswith("temperature 0.0\nsystem message: S\n3 messages are in ")
    assert err.splitlines()[-1].startswith("engine-client: top_p is 2.0, it must be")
    assert engine.requests[0].prompt_token_ids == ids_of("system:S;user:one;")
    assert file.exists()
