"""What users of other engines type at `engine-core` and `engine-client`."""

import os
import signal
import subprocess
import sys

import pytest

from engine_core import cli
from engine_core.errors import ConfigurationError
from engine_core.front_door import CLIENT_COMMANDS, as_typed
from frontend.cli.app import app as client_app
from frontend.cli.app import run_command_line
from protocol import programs
from protocol.addresses import default_address
from protocol.programs import python_module
from protocol.running_daemons import RunningDaemon, listed

OWN = {*cli.app} - CLIENT_COMMANDS.keys()


class Executed(Exception):
    pass


@pytest.fixture
def executed(monkeypatch):
    def execute(_path, command):
        raise Executed(command[command.index("-m") + 1 :])

    monkeypatch.setattr(programs.os, "execv", execute)


@pytest.mark.parametrize(
    ("typed", "runs"),
    [
        (["smollm2", "--num-threads", "2"], ["--model", "smollm2", "--num-threads", "2"]),
        (["org/name:Q4_K_M"], ["--model", "org/name:Q4_K_M"]),
        (["--model", "x"], ["--model", "x"]),
        (["pull", "x"], ["pull", "x"]),
        (["--help"], ["--help"]),
        (["help"], ["--help"]),
        (["-v"], ["--version"]),
        (["ls"], ["list"]),
        (["help", "rm"], ["rm", "--help"]),
        ([], []),
    ],
)
def test_a_model_may_stand_without_its_option(typed, runs):
    assert as_typed(typed, OWN) == runs


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("--swap-space=4", "--host-cache-memory"),
        ("--swap_space", "--host-cache-memory"),
        ("-ngl", "--device"),
        ("--verbose", "complete"),
        ("-O3", "the engine decides"),
    ],
)
@pytest.mark.parametrize("first", ["smollm2", "check"])
def test_an_option_of_another_engine_is_answered_with_ours(option, instead, first):
    said = f"no option {option.partition('=')[0].replace('_', '-')}: .*{instead}"
    with pytest.raises(ConfigurationError, match=said):
        as_typed([first, option], OWN)


def test_a_command_of_the_client_is_handed_over_with_all_its_options(executed):
    typed = ["serve", "smollm2", "--port", "8001", "-tp", "2", "--config", "x.toml"]
    with pytest.raises(Executed) as seen:
        as_typed(typed, OWN)
    assert seen.value.args[0] == ["frontend.cli", *typed]
    with pytest.raises(Executed) as seen:
        as_typed(["help", "run"], OWN)
    assert seen.value.args[0] == ["frontend.cli", "run", "--help"]
    with pytest.raises(Executed) as seen:
        run_command_line(["pull", "smollm2"])
    assert seen.value.args[0] == ["engine_core.cli", "pull", "smollm2"]


def test_the_door_knows_every_command_of_the_client():
    assert {name for name in client_app if not name.startswith("-")} - {"-h"} == set(
        CLIENT_COMMANDS
    )


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("signin", "never sent"),
        ("pul", "did you mean 'pull'"),
        ("sevre", "did you mean 'serve'"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_right_one(typed, advice):
    with pytest.raises(ConfigurationError, match=advice):
        as_typed([typed, "x"], OWN)


@pytest.mark.parametrize("command", ["serve", "run"])
def test_without_a_model_it_is_said_what_to_type(command, capsys):
    assert run_command_line([command]) == 2
    assert f"{command} smollm2-135m-instruct" in capsys.readouterr().err


def test_a_folder_of_the_users_hides_no_package_of_ours(monkeypatch, tmp_path):
    (tmp_path / "frontend").mkdir()
    monkeypatch.chdir(tmp_path)
    command = [*python_module("frontend.cli"), "--version"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.run(command, capture_output=True, env=env, check=False).returncode == 0


def test_stop_ends_one_daemon_by_name_or_says_which_there_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def stop(*arguments):
        monkeypatch.setattr(sys, "argv", ["engine-core", "stop", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capsys.readouterr()

    assert stop()[0] == 3
    program = (
        "import os, signal, sys; from protocol.running_daemons import RunningDaemon, listed\n"
        "with listed(RunningDaemon(pid=os.getpid(), model='m', address='ipc:///x', files='')):\n"
        "    print(flush=True); signal.pause()"
    )
    other = RunningDaemon(pid=1, model="other", address="ipc:///y", files="")
    usual = RunningDaemon(pid=2, model="usual", address=default_address(), files="")

    def kill(pid, _signal):
        raise Executed(pid)

    with listed(other), listed(usual), monkeypatch.context() as patched:
        patched.setattr(os, "kill", kill)
        with pytest.raises(Executed) as seen:
            stop()
    assert seen.value.args == (usual.pid,)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as daemon:
        daemon.stdout.readline()
        with listed(other):
            code, said = stop()
            assert (code, "several daemons run; name one by its pid" in said.err) == (3, True)
            assert "no daemon n runs" in stop("n")[1].err
            assert stop("m") == (0, ("stopped m\n", ""))
        assert daemon.wait() == -signal.SIGTERM


def test_a_file_of_options_that_is_no_toml_is_named(tmp_path, capsys):
    file = tmp_path / "engine.toml"
    file.write_text("x = [")
    typed = ["--config", str(file)]
    assert cli.app.meta(typed, exit_on_error=False, result_action="return_value") == 2
    assert f"--config: {file} cannot be read: Invalid value" in capsys.readouterr().err
