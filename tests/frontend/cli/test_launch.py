"""`engine-client launch`: what programs are told, and what becomes of them and their server."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_engine import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "http"))

from http_server import serving

from frontend.cli import launch as launch_module
from frontend.cli.app import run_command_line

TOLD = tomllib.loads(Path(launch_module.__file__).with_suffix(".toml").read_text())
PROGRAM = """#!/bin/sh
echo "$0" "$@" > "$SEEN"; env >> "$SEEN"
for each in "$@"; do if [ -f "$each" ]; then cat "$each" >> "$SEEN"; fi; done
[ "$WAITS" ] && { trap 'exit 9' TERM; touch "$SEEN.ready"; while :; do sleep 0.05; done; }
exit 7
"""
SERVER = """
import json, pathlib, signal, sys
url, model, *words = sys.argv[1:3] + sys.argv[3:]
here = pathlib.Path(__file__)
if "serve" in words:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    here.with_name("served").write_text(" ".join(words))
    print(json.dumps({"url": url}), flush=True)
    signal.sigwait([signal.SIGTERM])
    here.with_name("ended").touch()
"""


@pytest.fixture
def url(engine):
    with serving(engine.address, "fake", "other/name:1") as url:
        yield url


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """The file in which the programs write what they see; they lie on PATH, HOME is empty."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for name in TOLD:
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path / "seen"


@pytest.mark.parametrize("program", TOLD)
def test_a_program_is_told_of_the_server_by_its_own_means(program, url, seen, capfd):
    words = ["launch", program, "other/name:1", "--url", f"{url}/v1", "--", "-p", "a b", "--help"]
    assert run_command_line(words) == 7
    told = seen.read_text()
    first, *rest = told.split("\n")
    assert first.endswith(" -p a b --help")
    variables = dict(each.split("=", 1) for each in rest if "=" in each)
    assert url in told and "other/name:1" in told and "512" in told
    assert "$" not in "".join(variables.get(name, "") for name in TOLD[program]["environment"])
    assert ("ANTHROPIC_API_KEY" in variables) == (program != "claude")
    assert not [*(seen.parent / "home").iterdir()]
    said = capfd.readouterr().err
    assert f"{program} with other/name:1 at {url}, 512 tokens of context" in said
    if program == "opencode":
        config = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
        (models,) = [each["models"] for each in config["provider"].values()]
        assert models["other/name:1"]["limit"] == {"context": 512, "output": 128}
    if program == "aider":
        assert '"max_input_tokens": 512' in told
        assert not Path(first.split("--model-metadata-file ")[1].split()[0]).exists()


def test_a_dry_run_prints_a_command_that_does_the_same(url, seen, capsys):
    words = ["launch", "claude", "--url", url, "--dry-run", "--", "-p", "it's"]
    assert run_command_line(words) == 0
    assert not seen.exists()
    printed = shlex.split(capsys.readouterr().out)
    assert subprocess.run(printed, check=False).returncode == 7
    told = seen.read_text()
    assert f"ANTHROPIC_BASE_URL={url}\n" in told and "ANTHROPIC_MODEL=fake\n" in told
    assert "ANTHROPIC_API_KEY" not in told


def test_what_cannot_be_launched_says_what_to_do(url, seen, capsys, monkeypatch):
    monkeypatch.setattr(launch_module, "_DEFAULT_URL", "http://127.0.0.1:9")
    for words, code, said in (
        (["claude"], 2, "no server answers at http://127.0.0.1:9; name a MODEL"),
        (["claude", "fake", "-p"], 2, "'-p': arguments of claude stand behind --"),
        (["claude", "gpt-9", "--url", url], 1, "has no 'gpt-9', it has fake, other/name:1"),
        (["claude", "--url", "http://127.0.0.1:9"], 1, "no server of ours answers at http://"),
    ):
        assert run_command_line(["launch", *words]) == code
        assert said in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/nowhere")
    assert run_command_line(["launch", "codex", "--url", url]) == 1
    assert "npm install -g @openai/codex" in capsys.readouterr().err


def test_a_server_is_started_for_a_model_that_none_has_and_ends_with_the_program(
    url, seen, tmp_path, monkeypatch
):
    (tmp_path / "server.py").write_text(SERVER)
    stub = [sys.executable, str(tmp_path / "server.py"), url]
    monkeypatch.setattr(launch_module, "python_module", lambda module: [*stub, module])
    monkeypatch.setattr(launch_module, "_DEFAULT_URL", url)  # which has others
    assert run_command_line(["launch", "claude", "third", "--startup-timeout", "9"]) == 7
    served = (tmp_path / "served").read_text()
    assert served == "serve third --port 0 --startup-timeout 9"
    assert (tmp_path / "ended").exists()
    assert "ANTHROPIC_MODEL=fake\n" in seen.read_text(), "the name that it serves it under"


def test_signals_reach_the_program_whose_exit_code_it_is(url, seen, monkeypatch):
    monkeypatch.setenv("WAITS", "1")
    command = [sys.executable, "-m", "frontend.cli", "launch", "claude", "--url", url]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as launched:
        wait_until(seen.with_name("seen.ready").exists, within_s=20)
        launched.send_signal(signal.SIGTERM)
        assert launched.wait(10) == 9
