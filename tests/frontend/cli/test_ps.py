"""`engine-client ps` on scripted engines."""

import json
import os

import pytest

from frontend.cli.app import run_command_line
from protocol.running_daemons import RunningDaemon, listed


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def daemon(address, **more):
    return RunningDaemon(pid=os.getpid(), model="m", address=address, files="/m", **more)


def test_a_daemon_has_a_row_and_an_object(engine, capsys):
    with listed(daemon(engine.address, keep_alive_s=90.0)):
        assert run_command_line(["ps"]) == 0
        head, row = capsys.readouterr().out.splitlines()
        assert run_command_line(["ps", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert head.split() == ["MODEL", "PID", "UPTIME", "REQUESTS", "MEMORY", "KEEP-ALIVE", "ADDRESS"]
    assert row.startswith(f"m      {os.getpid()}")
    assert "0 running, " in row
    assert "0:01:30" in row
    assert row.endswith(engine.address)
    assert (found["pid"], found["num_running"], found["keep_alive_s"]) == (os.getpid(), 0, 90.0)
    assert found["memory_bytes"] > 2**20


def test_one_that_does_not_answer_is_listed_too(address, capsys, monkeypatch):
    monkeypatch.setattr("frontend.cli.ps._ANSWER_S", 0.1)
    with listed(daemon(f"{address}.nothing", keep_alive_s=-1)):
        assert run_command_line(["ps"]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert "no answer" in row
    assert "for ever" in row


def test_without_a_daemon_there_is_the_head_alone(capsys):
    assert run_command_line(["ps"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert run_command_line(["--address", "ipc:///x", "ps"]) == 2
