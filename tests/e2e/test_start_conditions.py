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
import tempfile
import time
from pathlib import Path

import pytest
from daemons import run_to_exit, running_daemon
from processes import children_of, wait_until
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
    with running_daemon(tiny_llama, *SMALL, bind=f"ipc://{tmp_path}/s") as daemon:
        daemon.kill()
        assert (tmp_path / "s").exists()
        daemon.start()
        with RawClient(daemon.address) as client:
            client.complete(PROMPT)
        assert daemon.stop() == 0


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
    bind = ("--bind", f"ipc://{tmp_path}/s")
    done = run_to_exit("--model", tiny_llama, *bind, program=("-c", NO_HOME))
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
    file.write_text(json.dumps(config | {"max_position_embeddings": 10**9, "num_hidden_layers": 1}))
    dummy = ("--load-format", "dummy", "--model-config", file)
    with running_daemon(None, *dummy) as daemon, RawClient(daemon.address) as client:
        status = Path(f"/proc/{daemon.process.pid}/status").read_text()
        client.complete(PROMPT)
        assert int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) < 10**6
        assert daemon.ready["phases_s"]["weights"] < 10
        assert daemon.ready["max_model_len"] <= 1677721  # of which a message is sure to have room
        assert "max_model_len is 1677721, not the model's 1000000000" in daemon.log()
        tokens, end = client.complete([1, 2, 3] * 5600, request_id="long")  # the tables grow
        assert (len(tokens), end.detail) == (8, None)


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


INTERRUPTED_SOCKET = """
import os, signal, zmq
add = zmq.Context._add_socket
def interrupted(self, socket):
    os.kill(os.getpid(), signal.SIGINT)
    add(self, socket)
zmq.Context._add_socket = interrupted
from engine_core.cli import main
main()
"""


def test_an_interrupt_while_a_socket_is_made_ends_the_start(tiny_llama, tmp_path):
    """A socket that its context does not know yet kept the context from ending."""
    bind = ("--bind", f"ipc://{tmp_path}/s")
    done = run_to_exit("--model", tiny_llama, *bind, program=("-c", INTERRUPTED_SOCKET))
    assert (done.returncode, done.stdout) == (130, "")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s").exists()


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


# ---------------------------------------------------------------------- what a system may lack


def start_in(shell, model, folder, *options):
    """`engine-core` started by these lines of a shell, in which "$@" stands for it: its exit code
    when it was stopped once it was ready, whether it was, and its standard error."""
    program = [sys.executable, "-m", "engine_core.cli", "--model", model, *map(str, SMALL)]
    command = [*program, "--bind", f"ipc://{folder}/s", *options]
    errors = folder / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "FOLDER": str(folder)},
        )
    try:
        is_ready = "ready" in process.stdout.readline()
        if is_ready:
            process.terminate()
        return process.wait(60), is_ready, errors.read_text()
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shell",
    [
        'umask 077; export LC_ALL=C LANG=C TMPDIR=/no/such/folder; exec "$@" <&-',
        'mkdir "$FOLDER/gone"; cd "$FOLDER/gone"; rmdir "$FOLDER/gone"; exec "$@" 2>/dev/full',
        'umask 000; ulimit -n 400; exec "$@" --log-format json 2>&-',
        'exec "$@" --supervise 2>/dev/full',
    ],
)
def test_it_starts_serves_and_drains(tiny_llama, tmp_path, shell):
    code, is_ready, errors = start_in(shell, tiny_llama, tmp_path)
    assert (code, is_ready) == (0, True), errors
    assert "Traceback" not in errors


NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.mark.slow
@pytest.mark.parametrize("hidden", ["/proc", "/dev/shm"])
def test_it_starts_without_a_folder_of_the_system(tiny_llama, tmp_path, hidden):
    if subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this system gives no namespace of mounts")
    hide = f'mount -t tmpfs -o mode=000,size=4k none {hidden}; exec "$@"'
    shell = f"exec {' '.join(NAMESPACE)} bash -c '{hide}' bash \"$@\""
    code, is_ready, errors = start_in(shell, tiny_llama, tmp_path)
    assert (code, is_ready) == (0, True), errors


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
@pytest.mark.parametrize("shell", ['exec "$@" >&- 2>&- <&-', 'exec "$@" >/dev/full 2>/dev/full'])
def test_closed_streams_and_full_disks_keep_the_exit_codes(tmp_path, shell, log_format):
    options = ("--log-format", log_format)
    assert start_in(shell, "/no/such/model", tmp_path, *options)[0] == 3
    assert start_in(shell, "/x", tmp_path, *options, "--preemption-mode", "swap")[0] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words"), [("-v 200000", "memory"), ("-v 500000", "memory"), ("-n 64", "LimitNOFILE")]
)
def test_too_little_memory_and_too_few_files_are_one_line(tiny_llama, tmp_path, limit, words):
    code, is_ready, errors = start_in(f'ulimit {limit}; exec "$@"', tiny_llama, tmp_path)
    assert (code, is_ready) == (3, False), errors
    assert words in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.slow
def test_a_trace_on_a_full_disk_stops_with_one_line_and_the_engine_serves(tiny_llama):
    with (
        running_daemon(tiny_llama, *SMALL, "--trace", "/dev/full") as daemon,
        RawClient(daemon.address) as client,
    ):
        tokens, end = client.complete(PROMPT)
        assert (len(tokens), end.detail) == (8, None)
        assert daemon.stop() == 0
        assert daemon.log().count("/dev/full") == 2  # the configuration, and the trace's end
        assert daemon.log().count("the trace /dev/full stops here: [Errno 28]") == 1


@pytest.mark.slow
def test_every_line_of_a_supervised_engine_that_dies_is_json(tiny_llama, tmp_path):
    options = (*SMALL, "--supervise", "--log-format", "json")
    with running_daemon(tiny_llama, *options) as daemon, RawClient(daemon.address) as client:
        client.socket.send(b"garbage")
        [engine] = children_of(daemon.process.pid)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: "started again" in daemon.log())
        assert daemon.stop() == 0
        lines = [json.loads(line) for line in daemon.log().splitlines()]
    assert {"engine_core.process.supervisor", "engine_core.startup.model"} <= {
        x["logger"] for x in lines
    }
    assert len({line["pid"] for line in lines}) >= 2


@pytest.mark.slow
def test_another_user_without_a_home_starts_it(tiny_llama, tmp_path_factory):
    if os.geteuid() != 0 or subprocess.run(["setpriv", "--version"], check=False).returncode:
        pytest.skip("only root starts it as another user")
    with tempfile.TemporaryDirectory(prefix="ec-") as name:
        folder = Path(name)
        shutil.copytree(tiny_llama, folder / "model")
        for path in (folder, *folder.rglob("*")):
            os.chown(path, 65534, 65534)
        shell = (
            "export HOME=/no/such; unset XDG_CACHE_HOME ENGINE_CORE_CACHE; "
            'exec setpriv --reuid 65534 --regid 65534 --clear-groups "$@"'
        )
        installation = [sys.executable, Path(__file__).parents[2] / "engine_core" / "cli.py"]
        can_read = ["bash", "-c", shell, "bash", "head", "-c1", *map(str, installation)]
        if subprocess.run(can_read, check=False, stdout=subprocess.DEVNULL).returncode:
            pytest.skip("that user may not read this installation")
        code, is_ready, errors = start_in(shell, folder / "model", folder)
        assert (code, is_ready) == (0, True), errors
        assert "Traceback" not in errors
