"""Where a daemon starts: at a terminal, over what a killed one left, without a home that it can
write to, with damaged files, with options that cannot be had."""

import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import run_to_exit, running_daemon
from raw_client import RawClient

PROMPT = list(range(1, 20))
SMALL = ("--num-blocks", 16)
NO_HOME = """
import os, pwd
os.environ.pop("HOME", None)
def getpwuid(uid):
    raise KeyError(uid)
pwd.getpwuid = getpwuid
from engine_core.cli import main
main()
"""


def test_a_person_at_a_terminal_reads_what_to_do_next(tiny_llama, tmp_path):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "engine_core.cli", "--model", tiny_llama, *map(str, SMALL)]
    address = f"ipc://{tmp_path}/s"
    process = subprocess.Popen(
        [*command, "--bind", address], stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    try:
        seen = ""
        while "Ctrl-C stops the daemon." not in seen:
            seen += os.read(master, 4096).decode()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert f"Serving {tiny_llama.name} at {address}" in seen
    assert f"engine-client --address {address} chat" in seen
    assert '"event"' not in seen
    assert "configuration:" not in seen
    assert len(seen) < 1200


def test_a_daemon_starts_over_the_socket_of_one_that_was_killed(tiny_llama, tmp_path):
    address = f"ipc://{tmp_path}/s"
    with running_daemon(tiny_llama, *SMALL, bind=address) as first:
        first.process.kill()
        first.process.wait()
        assert (tmp_path / "s").exists()
        with (
            running_daemon(tiny_llama, *SMALL, bind=address) as second,
            RawClient(address) as client,
        ):
            client.complete(PROMPT)
            assert second.stop() == 0


def test_a_home_that_cannot_be_written_is_no_reason_to_fail(tiny_llama, tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file: even root makes no folder in it")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("XDG_CACHE_HOME", "ENGINE_CORE_CACHE", "ENGINE_CORE_NATIVE_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    with running_daemon(tiny_llama, *SMALL) as daemon, RawClient(daemon.address) as client:
        client.complete(PROMPT)
        assert daemon.log().count("cannot write the native library") == 1
        assert daemon.stop() == 0


def test_without_a_home_one_line_says_which_variable_to_set(tiny_llama, tmp_path, monkeypatch):
    for variable in ("XDG_CACHE_HOME", "ENGINE_CORE_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    command = [
        sys.executable,
        "-c",
        NO_HOME,
        "--model",
        tiny_llama,
        "--bind",
        f"ipc://{tmp_path}/s",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "set ENGINE_CORE_CACHE to one" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_damaged_file_of_packed_weights_is_made_anew_with_a_line(
    tiny_llama, tmp_path, monkeypatch
):
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path))
    options = (*SMALL, "--quantization", "int8")
    with running_daemon(tiny_llama, *options) as daemon, RawClient(daemon.address) as client:
        if daemon.ready["weights"] != "int8":
            pytest.skip("no native kernels")
        expected = client.complete(PROMPT)[0]
    [kept] = (tmp_path / "weights").iterdir()
    kept.write_bytes(b"garbage" * 1000)
    with running_daemon(tiny_llama, *options) as daemon, RawClient(daemon.address) as client:
        assert daemon.log().count("the weights are packed anew") == 1
        assert client.complete(PROMPT)[0] == expected


def test_more_threads_than_there_are_is_said_in_one_line(tiny_llama):
    with running_daemon(tiny_llama, *SMALL, "--num-threads", 1000) as daemon:
        used = json.loads(re.search(r"configuration: (.*)", daemon.log())[1])["num_threads"]
        if used == 1000:
            pytest.skip("no native kernels: torch has as many as it is asked for")
        assert daemon.log().count(f"--num-threads is 1000, {used} are used") == 1


def test_a_config_with_a_huge_context_neither_takes_gigabytes_nor_seconds(tiny_llama, tmp_path):
    config = json.loads((tiny_llama / "config.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"max_position_embeddings": 10**9}))
    dummy = ("--load-format", "dummy", "--model-config", file)
    with running_daemon(None, *dummy) as daemon, RawClient(daemon.address) as client:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        client.complete(PROMPT)
        assert int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) < 10**6
        assert daemon.ready["phases_s"]["weights"] < 10
        assert daemon.ready["max_model_len"] <= 2**24
        assert "max_model_len is 16777216, not the model's 1000000000" in daemon.log()
        tokens, end = client.complete([1, 2, 3] * 5600, request_id="long")  # the tables grow
        assert (len(tokens), end.detail) == (8, None)


def test_exit_codes_tell_wrong_options_from_faults(tiny_llama, tmp_path):
    bind = ("--bind", f"ipc://{tmp_path}/s")
    wrong = ["--max-model-len", 100_000_000], ["--num-blocks", 0], ["--config", "/nowhere.toml"]
    for options in wrong:
        done = run_to_exit("--model", tiny_llama, *bind, *options)
        assert done.returncode == 2, options
        assert done.stdout == ""
    assert run_to_exit("--model", tmp_path / "nowhere", *bind).returncode == 3


def test_an_interrupt_during_the_start_ends_it_without_a_traceback(tiny_llama, tmp_path):
    command = [sys.executable, "-m", "engine_core.cli", "--model", str(tiny_llama)]
    address = f"ipc://{tmp_path}/s"
    process = subprocess.Popen(
        [*command, "--bind", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "s").exists():  # the socket is first, then the model
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", ["gguf", "safetensors", "config"])
def test_a_model_file_that_cannot_be_true_ends_the_start_with_one_line(kind, tiny_llama, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    model = folder
    if kind == "gguf":
        model = tmp_path / "x.gguf"
        model.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0) + bytes(64))
        words = r"x\.gguf .*9223372036854775808 tensors, the limit is 262144; download it again"
    elif kind == "safetensors":
        (folder / "model.safetensors").write_bytes((2**63).to_bytes(8, "little") + b"{}")
        words = r"model\.safetensors is truncated or not a safetensors file .*download it again"
    else:
        config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 10**12}
        (folder / "config.json").write_text(json.dumps(config))
        words = "num_hidden_layers is 1000000000000, the limit is 10000"
    done = run_to_exit("--model", model, "--bind", f"ipc://{tmp_path}/e.sock")
    assert done.returncode == 3
    assert re.search(words, done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
