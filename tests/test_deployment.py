"""The unit and the container file in docs/deployment: what they start exists, with options that it
takes."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from engine_core.cli import app
from engine_core.errors import ExitCode
from engine_core.options.checks import check_options
from engine_core.options.engine import EngineOptions
from frontend.cli.app import app as client_app

_ROOT = Path(__file__).parents[1]
UNIT = _ROOT / "docs/deployment/engine-core.service"
CONTAINER = _ROOT / "docs/deployment/Containerfile"


def service():
    unit = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    unit.optionxform = str
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def options_of(arguments) -> EngineOptions:
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    options = bound.arguments["options"]
    check_options(options)
    return options


def instructions():
    text = CONTAINER.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_unit_starts_an_engine_that_fits_its_limits():
    unit = service()
    program, *arguments = shlex.split(unit["ExecStart"])
    assert Path(program).name == "engine-core"
    options = options_of(arguments)
    assert (unit["Type"], unit["NotifyAccess"]) == ("notify", "main")
    assert unit["KillMode"] == "mixed", "else the engine gets two SIGTERMs, and aborts"
    assert float(unit["TimeoutStopSec"]) > options.drain_timeout + 10
    assert float(unit["WatchdogSec"]) > options.watchdog_timeout
    assert options.bind == f"ipc:///run/{unit['RuntimeDirectory']}/engine.sock"
    never_again = {int(code) for code in unit["RestartPreventExitStatus"].split()}
    assert never_again == {ExitCode.WRONG_OPTIONS, ExitCode.START_FAILED}


def test_systemd_takes_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", UNIT.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_starts_a_supervisor_as_process_1():
    found = dict(instructions())
    program, *arguments = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    assert program == "engine-core"
    assert options_of(arguments).supervise
    assert found["USER"] not in ("", "0", "root")
    assert found["STOPSIGNAL"] == "SIGTERM"


def test_the_container_is_healthy_if_its_client_is_answered():
    check = dict(instructions())["HEALTHCHECK"]
    program, *arguments = json.loads(check.partition("CMD ")[2])
    assert program == "engine-client"
    _, bound, _ = client_app.parse_args(arguments, exit_on_error=False, print_error=False)
    entrypoint = json.loads(dict(instructions())["ENTRYPOINT"])
    assert bound.arguments["daemon"].address in entrypoint


def test_the_container_copies_what_is_there():
    for word, rest in instructions():
        if word == "COPY":
            *sources, _target = rest.split()
            assert all((_ROOT / source).exists() for source in sources), rest
