"""`engine-client run MODEL`: whose daemon answers."""

import os
import subprocess
from types import SimpleNamespace

import pytest
from fake_model import TOKENIZER, saying

from frontend.cli.app import run_command_line
from protocol.presets import Parameters, Preset, write_preset
from protocol.running_daemons import RunningDaemon, listed


def test_a_daemon_that_has_the_model_answers(start_engine, address, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    start_engine(next_token=saying("ok", then_eos=True))
    daemon = RunningDaemon(
        pid=os.getpid(), model="Tiny.Q4_1", asked="tiny", address=address, files=""
    )
    with listed(daemon):
        assert run_command_line(["run", "tiny", "Say", "ok", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "ok\n"


def test_a_preset_is_answered_by_the_daemon_of_its_model(
    start_engine, address, capsys, monkeypatch, tmp_path
):
    for name in ("XDG_RUNTIME_DIR", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    engine = start_engine(next_token=saying("ok", then_eos=True))
    preset = Preset(from_="tiny", system="S", parameters=Parameters(top_k=3, num_predict=9))
    write_preset("mario", preset)
    daemon = RunningDaemon(pid=os.getpid(), model="T", asked="tiny", address=address, files="")
    with listed(daemon):
        assert run_command_line(["run", "mario", "Hi", "--temperature", "0.5"]) == 0
    assert capsys.readouterr().out == "ok\n"
    (request,) = engine.requests
    assert TOKENIZER.decode(request.prompt_token_ids) == "system:S;user:Hi;"
    params = request.sampling_params
    assert (params.top_k, params.max_tokens, params.temperature) == (3, 9, 0.5)


@pytest.mark.parametrize("question", [[], ["Which", "language?"]])
def test_what_is_piped_stands_before_the_question_and_is_one_prompt(
    start_engine, address, capsys, monkeypatch, tmp_path, question
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    engine = start_engine(next_token=saying("ok", then_eos=True))
    (tmp_path / "code").write_text("def f(x):\n  return x\n")
    daemon = RunningDaemon(pid=os.getpid(), model="T", asked="tiny", address=address, files="")
    with listed(daemon), (tmp_path / "code").open() as piped:
        monkeypatch.setattr("sys.stdin", piped)
        assert run_command_line(["run", "tiny", *question]) == 0
    assert capsys.readouterr().out == "ok\n"
    (request,) = engine.requests
    prompt = " ".join(["def f(x):\n  return x", *question])
    assert TOKENIZER.decode(request.prompt_token_ids) == f"user:{prompt};"


def test_a_daemon_that_another_terminal_uses_ends_when_that_has_left(
    start_engine, address, capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    start_engine(next_token=saying("ok", then_eos=True))
    looks, closed_after = [], []

    class Started:
        has_ended = False

        def __init__(self, _arguments):
            self.address = address

        async def ready(self, _timeout_s):
            pass

        async def close(self):
            closed_after.append(len(looks))

    async def statistics_of(_address):
        looks.append(1)
        return SimpleNamespace(num_clients=2 if len(looks) < 7 else 1)

    monkeypatch.setattr("frontend.cli.run.statistics_of", statistics_of)
    monkeypatch.setattr("frontend.cli.run.ChildDaemon", Started)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    assert run_command_line(["run", "tiny", "Hi"]) == 0
    said = capsys.readouterr()
    assert (said.out, closed_after) == ("ok\n", [7])
    assert "others talk with tiny" in said.err


def test_an_option_that_nobody_knows_is_said_before_anything_is_fetched(capfd):
    assert run_command_line(["run", "no-such-model", "--num-threads", "2", "Hi"]) == 2
    assert "a prompt stands before the daemon's options" in capfd.readouterr().err


def test_where_none_has_it_and_it_cannot_be_fetched_it_is_said(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_command_line(["run", "no-such-model", "Hi"]) == 1
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "'no-such-model' is neither" in said.err
