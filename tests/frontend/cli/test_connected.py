"""What `engine-client` says while an engine does not answer: a stopped process, a foreign port, one
that is lost in a stream."""

import os
import socket
import subprocess
import sys
import threading

import pytest
from fake_model import saying

from frontend.cli.app import run_command_line
from protocol.running_daemons import RunningDaemon, listed, note_daemon

pytestmark = pytest.mark.slow


@pytest.fixture
def run(capsys):
    def run_it(*arguments):
        code = run_command_line(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err.splitlines()

    return run_it


@pytest.mark.parametrize("command", [["info"], ["chat"]])
def test_a_silent_engine_is_waited_for_aloud(run, start_engine, address, command):
    start_engine(mute=True)
    code, out, err = run(*command, "--address", address, "--connect-timeout", "1.5")
    assert (code, out, len(err)) == (1, "", 2)
    assert err[0].startswith(f"engine-client: waiting for an engine to answer at {address}, until ")
    assert err[0].endswith("(--connect-timeout 1.5)")
    assert "no engine answers" in err[1]
    assert "waited 1.5 s" in err[1]


def test_a_port_of_another_program_is_waited_for_aloud(run):
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        address = f"tcp://127.0.0.1:{foreign.getsockname()[1]}"
        code, out, err = run("info", "--address", address, "--connect-timeout", "1.2")
    assert (code, out, len(err)) == (1, "", 2)
    assert "waiting for an engine" in err[0]


def test_an_engine_that_is_lost_in_a_stream_is_waited_for_aloud(run, start_engine, address):
    start_engine(next_token=saying("abc"), die_after_tokens=3)
    code, out, err = run("complete", "Hi", "--address", address, "--reconnect-timeout", "1.6")
    assert (code, out, len(err)) == (1, "abc\n", 2)
    assert "lost the engine" in err[0]
    assert err[0].endswith("(--reconnect-timeout 1.6)")
    assert "is gone" in err[1]


def test_where_none_was_named_the_only_one_answers_and_of_several_all_are_named(
    run, start_engine, address, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    # another process of this machine may be starting there
    monkeypatch.setattr("frontend.cli.connected._is_being_started", lambda _address: False)
    assert "yours" not in run("info")[2][0]
    start_engine(next_token=saying("ok", then_eos=True))
    with listed(RunningDaemon(pid=os.getpid(), model="T", address=address, files="")):
        said = [f"engine-client: talking with T at {address}"]
        assert run("complete", "Hi") == (0, "ok\n", said)
        with listed(RunningDaemon(pid=1, model="U", address="ipc:///x", files="")):
            assert "one of yours that run: --address " in run("info")[2][0]


@pytest.mark.parametrize("option", ["--connect-timeout", "--reconnect-timeout"])
@pytest.mark.parametrize("limit", ["0", "-1", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(run, address, option, limit):
    code, out, err = run("info", "--address", address, f"{option}={limit}")
    assert (code, out, len(err)) == (2, "", 1)
    assert option in err[0]


def test_a_daemon_that_has_just_been_started_is_waited_for(run, start_engine, address, tmp_path):
    program = tmp_path / "engine-core"  # it has no socket yet, and is on no list
    program.write_text("import time; time.sleep(60)")
    with subprocess.Popen([sys.executable, program, "--bind", address]) as started:
        later = threading.Timer(0.5, lambda: start_engine(next_token=saying("ok", then_eos=True)))
        later.start()
        assert run("complete", "Hi", "--address", address) == (0, "ok\n", [])
        later.join()
        started.kill()


def test_a_daemon_that_is_starting_is_waited_for_as_long_as_that_takes(
    run, start_engine, address, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("frontend.cli.connected._STARTED_S", 0.1)
    monkeypatch.setattr("frontend.cli.connected._SILENT_S", 0.2)
    daemon = RunningDaemon(pid=1, model="m", address=address, files="", is_ready=False)
    with listed(daemon):

        def get_ready():
            start_engine(next_token=saying("ok", then_eos=True))
            note_daemon(1, is_ready=True)

        later = threading.Timer(0.6, get_ready)
        later.start()
        code, out, err = run("complete", "Hi", "--address", address)
        later.join()
    assert (code, out) == (0, "ok\n")
    assert err == [f"engine-client: waiting for the daemon at {address}, which is starting"]


def test_a_limit_that_is_given_holds_for_the_start_too(run, address, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    daemon = RunningDaemon(pid=1, model="m", address=address, files="", is_ready=False)
    with listed(daemon):
        code, out, err = run("info", "--address", address, "--connect-timeout", "0.2")
    assert (code, out, len(err)) == (1, "", 1)
    assert "is still starting (waited 0.2 s)" in err[0]
