"""`engine-client serve`: daemon and server in one command, which end together."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import httpx
import pytest
from processes import children_of, command_of, descendants_of, maps, wait_until_gone

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def serving(model, *options):
    """The process and its URL."""
    command = [sys.executable, "-m", "frontend.cli", "serve", str(model), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        yield process, json.loads(line)["url"]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_both_end_together_whatever_ends_the_server(smollm2, end):
    with serving(smollm2, "--max-num-seqs", "4") as (process, url):
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
        pids = descendants_of(process.pid)
        assert pids
        process.send_signal(end)
        code = process.wait(20)
        assert code == (0 if end != signal.SIGKILL else -signal.SIGKILL)
        wait_until_gone(*pids)


def test_what_is_printed_is_a_command_that_works(smollm2):
    with serving(smollm2, "--served-model-name", "small") as (process, url):
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "small"
        lines = iter(process.stderr.readline, "")
        command = next(line for line in lines if line.startswith("curl "))
        assert url in command
        printed = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True
        )
        assert json.loads(printed.stdout)["choices"][0]["message"]["content"]


def test_an_engine_that_dies_is_started_again_and_the_stream_goes_on(smollm2):
    body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with serving(smollm2) as (process, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            chunks = response.iter_text()
            text = next(chunks)
            for pid in descendants_of(process.pid):
                if "engine_core.cli" in command_of(pid) and not children_of(pid):
                    os.kill(pid, signal.SIGKILL)
            text += "".join(chunks)
        assert text.endswith("data: [DONE]\n\n")
        assert '"completion_tokens":200' in text
        assert process.poll() is None


def test_without_supervision_the_death_of_the_engine_ends_the_server(smollm2):
    with serving("smollm2-135m-instruct", "--no-supervise") as (process, url):
        assert smollm2.exists()
        found = httpx.get(f"{url}/v1/models").json()["data"]
        assert [each["id"] for each in found] == ["smollm2-135m-instruct"]
        # the templates' process may be there by now
        (engine,) = (pid for pid in children_of(process.pid) if maps(pid, "libtorch"))
        os.kill(engine, signal.SIGKILL)
        assert process.wait(20) == 1
        assert "killed by signal 9" in process.stderr.read()


def test_wrong_options_of_the_daemon_end_the_command_with_its_words():
    command = [sys.executable, "-m", "frontend.cli", "serve", "/nothing", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3, "what the engine's own says: starting again changes nothing"
    assert "/nothing" in ended.stderr
    assert "exit code 3" in ended.stderr
