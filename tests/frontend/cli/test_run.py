"""`engine-client run MODEL`: whose daemon answers."""

import os

from fake_model import saying

from frontend.cli.app import run_command_line
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


def test_where_none_has_it_and_it_cannot_be_fetched_it_is_said(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_command_line(["run", "no-such-model", "Hi"]) == 1
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "'no-such-model' is neither" in said.err
