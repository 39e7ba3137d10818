"""The client where Unix's modules, sockets and permissions are not: it reaches engines over TCP."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from fake_engine import FakeEngine
from fake_model import expected_text

from protocol.keys import ClientKey


def test_a_client_on_windows_reaches_an_engine_over_tcp(tmp_path):
    key = tmp_path / "me.key"
    key.write_bytes(msgspec.json.encode(ClientKey("me", "s" * 40, "p" * 40, "x" * 40)))
    key.chmod(0o666)  # as Windows shows a file, whoever may read it
    with FakeEngine("tcp://127.0.0.1:*") as engine:
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("windows.py"), engine.address, key],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    text, no_chat, name, no_address, no_daemon, *info = done.stdout.splitlines()
    assert text == expected_text("on a stick", 4)
    assert "Windows has no bounds" in no_chat
    assert name == "me"
    assert "tcp://HOST:PORT" in no_address
    assert "tcp://HOST:PORT" in no_daemon
    assert any(engine.address in line for line in info)
