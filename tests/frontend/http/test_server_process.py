"""`engine-client http` as a process: its first line, its end, and where it listens."""

import contextlib
import json
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from fake_engine import wait_until

from frontend.cli.app import run_command_line

pytestmark = pytest.mark.slow

LONG = {"prompt": "Hello", "max_tokens": 400, "ignore_eos": True, "stream": True}


class Server:
    """A running `engine-client`; `ready` is its first line."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "frontend.cli", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        self.ready = json.loads(line) if line else None
        self.url = self.ready["url"] if line else None

    def stop(self, within_s=20):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(within_s)


@contextlib.contextmanager
def server(*arguments):
    running = Server(*arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


def http(engine, *more):
    return server("--address", engine.address, "http", "--port", 0, *more)


def end_of(*arguments):
    """Exit code and lines of a server that does not start."""
    with server(*arguments) as running:
        code = running.process.wait(20)
        return code, running.process.stderr.read().splitlines()


def test_the_first_line_says_where_it_serves_and_sigterm_ends_it_with_0(engine):
    with http(engine, "--served-model-name", "a", "--served-model-name", "b") as running:
        assert running.ready["event"] == "ready"
        cards = httpx.get(f"{running.url}/v1/models").json()["data"]
        assert [card["id"] for card in cards] == ["a", "b"]
        assert running.stop(5) == 0
    assert engine.num_goodbyes == 1


def test_with_json_all_lines_on_stderr_are_objects_of_one_form(engine):
    with http(engine, "--log-format", "json", "--access-log", "text") as running:
        httpx.get(f"{running.url}/v1/models")
        assert running.stop(5) == 0
        lines = [json.loads(line) for line in running.process.stderr.read().splitlines()]
    assert [line["message"][:10] for line in lines] == ["Serving at", "GET /v1/mo"]
    for line in lines:
        assert list(line)[:5] == ["time", "level", "logger", "message", "pid"]


def test_a_stream_ends_whole_after_sigterm_while_nobody_else_connects(start_engine):
    engine = start_engine(step_s=0.005)
    with http(engine) as running:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=LONG) as response:
            chunks = response.iter_text()
            text = next(chunks)
            running.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{running.url}/health")
            text += "".join(chunks)
        assert text.endswith("data: [DONE]\n\n")
        assert running.process.wait(10) == 0


@pytest.mark.parametrize("drain_timeout_s", [1, 30])
def test_a_stream_that_takes_too_long_or_a_second_signal_cuts_it(start_engine, drain_timeout_s):
    engine = start_engine(step_s=0.1)
    with http(engine, "--drain-timeout", drain_timeout_s) as running:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=LONG) as response:
            chunks = response.iter_raw()
            next(chunks)
            running.process.send_signal(signal.SIGTERM)
            if drain_timeout_s == 30:
                time.sleep(0.5)
                running.process.send_signal(signal.SIGTERM)
            rest = b""
            with contextlib.suppress(httpx.RemoteProtocolError):
                for chunk in chunks:
                    rest += chunk
            assert b'"finish_reason":"length"' not in rest
        assert running.process.wait(5) == 0
        assert "Traceback" not in running.process.stderr.read()
    wait_until(lambda: engine.num_goodbyes == 1)  # which ends its requests


def test_a_port_that_is_taken_is_one_line_and_exit_code_3(engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, lines = end_of("--address", engine.address, "http", "--port", port)
    assert code == 3
    (line,) = lines
    assert str(port) in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--model", "=nothing"], "NAME=ADDRESS"),
        (["--model", "a=nothing"], "address"),
        (["--model", "a", "--model", "a"], "given twice"),
        (["--model", "a", "--keep-alive", "soon"], "keep-alive is 'soon'"),
        (["--model", "a", "--startup-timeout", "0"], "--startup-timeout is 0"),
        (["--no-such-option"], "'--no-such-option'"),
        (["--model", "a=ipc:///x,ipc:///y", "--model", "a=ipc:///x"], "twice"),
        (["--model", "a=ipc:///x,ipc:///y", "--model", "b=ipc:///x"], "same addresses"),
        (["--model", "a=ipc:///x,"], "address"),
        (["--model", "a=ipc:///x", "--served-model-name", "b"], "--served-model-name"),
        (["--access-log", "xml"], "access-log"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(arguments, words, capsys):
    assert run_command_line(["http", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_unix_socket_is_this_users_own_and_a_dead_servers_is_replaced(engine, address):
    path = address.removeprefix("ipc://") + ".http"
    transport = httpx.HTTPTransport(uds=path)
    with http(engine, "--uds", path) as running:
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            assert client.get("/health").status_code == 200
        code, (line,) = end_of("http", "--uds", path)
        assert code == 3
        assert path in line
        running.process.kill()
        running.process.wait()
    with http(engine, "--uds", path) as running:
        assert running.stop() == 0


def test_https_is_served_with_a_certificate(engine, tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1"]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    with http(engine, "--ssl-certfile", certificate, "--ssl-keyfile", key) as running:
        assert running.url.startswith("https://")
        context = ssl.create_default_context(cafile=certificate)
        answer = httpx.get(f"{running.url}/health", verify=context)
        assert answer.status_code == 200
    code, (line,) = end_of("http", "--ssl-certfile", key, "--ssl-keyfile", certificate)
    assert code == 2
    assert "PEM" in line


def test_more_connections_than_descriptors_end_neither_server_nor_requests(engine):
    command = f"ulimit -n 256; exec {sys.executable} -m frontend.cli --address {engine.address}"
    process = subprocess.Popen(
        ["bash", "-c", f"{command} http --port 0"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = json.loads(process.stdout.readline())["url"]
        port = int(url.rpartition(":")[2])
        with httpx.Client(base_url=url, timeout=60) as client, contextlib.ExitStack() as idle:
            assert client.get("/health").status_code == 200
            for _ in range(400):
                idle.enter_context(socket.create_connection(("127.0.0.1", port)))
            descriptors = Path(f"/proc/{process.pid}/fd")
            wait_until(lambda: 128 < len(list(descriptors.iterdir())) < 200)
            assert client.get("/health").status_code == 200
            engine.stop()
            assert client.get("/health").status_code == 503
            assert process.poll() is None
        wait_until(lambda: httpx.get(f"{url}/version", timeout=60).status_code == 200)
    finally:
        process.kill()
        process.communicate()
