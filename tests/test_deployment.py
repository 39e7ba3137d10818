"""The unit and the container file in docs/deployment: what they start exists, with options that it
takes."""

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from engine_core.cli import app
from engine_core.errors import ExitCode
from engine_core.options.checks import check_options
from engine_core.options.engine import EngineOptions
from frontend.cli.app import app as client_app
from scripts import install

_ROOT = Path(__file__).parents[1]
UNIT = _ROOT / "docs/deployment/engine-core.service"
HTTP_UNIT = _ROOT / "docs/deployment/engine-http.service"
CONTAINER = _ROOT / "docs/deployment/Containerfile"


def service(file=UNIT):
    unit = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    unit.optionxform = str
    unit.read_string(file.read_text())
    return unit["Service"]


def options_of(arguments) -> EngineOptions:
    _, bound, _ = app.parse_args(arguments, exit_on_error=False, print_error=False)
    options = bound.arguments["options"]
    check_options(options)
    return options


def client_arguments(arguments):
    _, bound, _ = client_app.parse_args(arguments, exit_on_error=False, print_error=False)
    return bound.arguments


def instructions(target=None):
    """Of the target and what it stands on; None: of the whole file."""
    text = CONTAINER.read_text().replace("\\\n", " ")
    stages = re.split(r"(?m)^(?=FROM )", text)[1:]
    if target is not None:
        stages = [stage for stage in stages if f" AS {target}\n" in stage or " AS base\n" in stage]
    lines = [line for line in "".join(stages).splitlines() if line and not line.startswith("#")]
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


def test_the_unit_of_http_starts_a_server_that_fits_its_limits():
    unit = service(HTTP_UNIT)
    program, *arguments = shlex.split(unit["ExecStart"])
    assert Path(program).name == "engine-client"
    bound = client_arguments(arguments)
    options_of(["--model", arguments[1], *bound.get("engine_options", ())])
    assert bound["settings"].check() is None
    assert float(unit["TimeoutStopSec"]) > bound["settings"].drain_timeout
    assert unit["KillMode"] == "mixed"


@pytest.mark.parametrize("file", [UNIT, HTTP_UNIT])
def test_a_unit_waits_for_the_network_that_its_first_start_needs(file):
    assert {"Wants=network-online.target", "After=network-online.target"} <= {
        *file.read_text().splitlines()
    }


@pytest.mark.parametrize("file", [UNIT, HTTP_UNIT])
def test_systemd_takes_the_unit(tmp_path, file):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / file.name
    unit.write_text(re.sub(r"ExecStart=\S+", f"ExecStart={shutil.which('true')}", file.read_text()))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_starts_a_supervisor_as_process_1():
    found = dict(instructions("daemon"))
    program, *arguments = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    assert program == "engine-core"
    assert options_of(arguments).supervise
    assert found["USER"] not in ("", "0", "root")
    assert found["STOPSIGNAL"] == "SIGTERM"


def test_the_container_is_healthy_if_its_client_is_answered():
    found = dict(instructions("daemon"))
    program, *arguments = json.loads(found["HEALTHCHECK"].partition("CMD ")[2])
    assert program == "engine-client"
    assert client_arguments(arguments)["daemon"].address in json.loads(found["ENTRYPOINT"])


def test_the_default_container_serves_http_to_those_to_whom_its_port_is_published():
    assert [rest for word, rest in instructions() if word == "FROM"][-1] == "base AS http"
    found = dict(instructions("http"))
    program, command, *arguments = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    assert (program, command) == ("engine-core", "serve")
    settings = client_arguments(["serve", *arguments])["settings"]
    settings.check()
    assert not settings.is_local
    assert found["EXPOSE"] == str(settings.port)
    assert f":{settings.port}/health" in found["HEALTHCHECK"]


def test_the_container_has_a_version_for_every_dependency():
    lines = (_ROOT / "docs/deployment/constraints.txt").read_text().splitlines()[1:]
    versions = dict(line.split("==") for line in lines)
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"] + project["optional-dependencies"]["cpu"]:
        needed = Requirement(text)
        assert versions[needed.name] in needed.specifier, text
    assert f"torch=={versions['torch']}" in install.torch_arguments(
        has_gpu=False, index_answers=False
    )


def test_the_container_copies_what_is_there():
    for word, rest in instructions():
        if word == "COPY":
            *sources, _target = rest.split()
            assert all((_ROOT / source).exists() for source in sources), rest
            sent = (_ROOT / ".dockerignore").read_text().splitlines()
            for source in map(Path, sources):
                assert {f"!{source}", *(f"!{each}" for each in source.parents)} & {*sent}
