"""The process for what users write, at each of its limits."""

import subprocess
import sys
import threading

import msgspec
import pytest

from protocol.sandbox import Ending, SandboxEnded, SandboxLimits, SandboxProcess, SandboxRefused

LIMITS = SandboxLimits(cpu_s=0.3, wall_s=3, memory_bytes=512 << 20, answer_bytes=1 << 20)
ENDINGS = {
    b"crash": (Ending.CRASH, "by signal 11"),
    b"loop": (Ending.CPU_TIME, "0.3 s"),
    b"memory": (Ending.MEMORY, "512 MiB"),
    b"defect": (Ending.CRASH, "with exit code 1"),
}


@pytest.fixture
def process():
    process = SandboxProcess("tests.protocol.sandboxed", LIMITS, setup=lambda: b"given ")
    yield process
    process.close()


def test_a_request_that_ends_the_process_ends_alone(process, capfd):
    for request, (ending, detail) in ENDINGS.items():
        assert process.call(b"before") == b"given before"
        with pytest.raises(SandboxEnded, match=detail) as error:
            process.call(request)
        assert error.value.ending is ending
    assert process.call(b"\0" * 100_000) == b"given " + b"\0" * 100_000


def test_a_refusal_has_a_bounded_text_and_needs_no_new_process(process):
    assert process.call(b"") == b"given "
    pid = process.pid
    with pytest.raises(SandboxRefused, match="no: é") as error:
        process.call(b"refuse")
    assert len(str(error.value)) == 4000
    assert process.call(b"x") == b"given x"
    assert process.pid == pid


def test_no_answer_and_a_kill_from_outside_are_told_apart():
    limits = SandboxLimits(cpu_s=1, wall_s=1, memory_bytes=512 << 20, answer_bytes=100)
    process = SandboxProcess("tests.protocol.sandboxed", limits)
    with pytest.raises(SandboxEnded) as error:
        process.call(b"sleep")
    assert error.value.ending is Ending.WALL_TIME
    process.start()
    threading.Timer(0.2, process.kill).start()
    with pytest.raises(SandboxEnded, match="by signal 9"):
        process.call(b"sleep")
    process.close()
    assert process.pid is None


@pytest.mark.parametrize("received", [b"", b"\5\0", b"\5\0\0\0\0\0\0\0set"])
def test_a_starter_that_dies_while_it_starts_one_leaves_no_traceback(received):
    command = [sys.executable, "-m", "tests.protocol.sandboxed", msgspec.json.encode(LIMITS)]
    done = subprocess.run(command, input=received, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
