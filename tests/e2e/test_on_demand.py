"""`engine-client http --model NAME` with a real model: started by a request, and gone with its
server. `engine-client ps` and `engine-core rm` know it meanwhile."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import wait_until_gone

pytestmark = pytest.mark.slow

MODEL = "smollm2-135m-instruct"


@pytest.fixture
def run(tmp_path):
    """A command to its end, in a session of its own: other daemons of this user are not listed."""

    def run(module, *arguments):
        command = [sys.executable, "-m", module, *arguments]
        env = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)

    return run


@pytest.fixture
def server(tmp_path, smollm2):
    command = [sys.executable, "-m", "frontend.cli", "http", "--port", "0", "--model", MODEL]
    with subprocess.Popen(
        [*command, "--keep-alive", "1h", "--max-num-seqs", "4"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    ) as process:
        process.url = json.loads(process.stdout.readline())["url"]
        yield process
        process.kill()


def test_a_request_starts_it_and_it_ends_with_a_server_that_is_killed(server, run, smollm2):
    assert json.loads(run("frontend.cli", "ps", "--json").stdout) == []
    body = {"model": MODEL, "prompt": "Once", "stream": False, "options": {"num_predict": 4}}
    answer = httpx.post(f"{server.url}/api/generate", json=body, timeout=120).json()
    assert answer["eval_count"] == 4
    (listed,) = json.loads(run("frontend.cli", "ps", "--json").stdout)
    assert (listed["model"], listed["keep_alive_s"], listed["num_running"]) == (MODEL, 3600.0, 0)
    assert listed["files"] == str(Path(smollm2).resolve())
    assert listed["memory_bytes"] > 10**7
    shown = run("frontend.cli", "ps").stdout.splitlines()
    assert shown[0].split() == [
        "MODEL",
        "PID",
        "UPTIME",
        "REQUESTS",
        "MEMORY",
        "KEEP-ALIVE",
        "ADDRESS",
    ]
    assert "0 running, 0 waiting" in shown[1]
    assert "1:00:00" in shown[1]
    refused = run("engine_core.cli", "rm", MODEL)
    assert refused.returncode == 3
    assert f"pid {listed['pid']}" in refused.stderr
    assert Path(smollm2).exists()

    server.send_signal(signal.SIGKILL)
    wait_until_gone(listed["pid"])
    assert json.loads(run("frontend.cli", "ps", "--json").stdout) == []
