"""The parent that starts an engine again: when, how often, and what it returns. A few lines of
Python take the engine's place; each test starts real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_core.errors import ExitCode
from engine_core.process.supervisor import WINDOW_S, RestartLimit

pytestmark = pytest.mark.slow

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from engine_core.process.owner import Owner
from engine_core.process.service_manager import READY, ServiceManager
from engine_core.process.supervisor import supervise

folder = Path(sys.argv[1])

def serve(suspects):
    number = len(list(folder.glob("start*")))
    (folder / f"start{number}").write_text(str(os.getpid()))
    ENGINE

def oom_kills():
    file = folder / "oom_kills"
    return len(file.read_text()) if file.exists() else 3

service_manager = ServiceManager()
owner = Owner(watches_stdin=False, pid=int(sys.argv[2]) if len(sys.argv) > 2 else None)
sys.exit(supervise(serve, max_restarts=3, drain_timeout_s=0.0, owner=owner,
                   service_manager=service_manager, oom_kills=oom_kills))
"""


def start(folder, engine):
    return subprocess.Popen([sys.executable, "-c", PROGRAM.replace("ENGINE", engine), str(folder)])


def exit_code(folder, engine):
    process = start(folder, engine)
    try:
        return process.wait(60)
    finally:
        process.kill()


def pid_of_start(folder, number):
    """Waits for the start of this number."""
    file = Path(folder) / f"start{number}"
    deadline_s = time.monotonic() + 30
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline_s, f"no start {number}"
        time.sleep(0.005)
    return int(file.read_text())


def wait_until_gone(pid):
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            return
        assert time.monotonic() < deadline_s, f"process {pid} lives on"
        time.sleep(0.005)


def num_starts(folder):
    return len(list(folder.glob("start*")))


def test_the_first_restart_comes_at_once_and_each_further_one_after_twice_the_delay():
    limit = RestartLimit(9)
    assert [limit.next_delay_s(1.0) for _ in range(10)] == [
        0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0, None,
    ]  # fmt: skip


def test_restarts_that_are_older_than_the_window_do_not_count():
    limit = RestartLimit(2)
    assert [limit.next_delay_s(s) for s in (0.0, 1.0, 2.0)] == [0.0, 0.5, None]
    assert limit.next_delay_s(WINDOW_S) == 0.5
    assert limit.next_delay_s(3 * WINDOW_S) == 0.0


@pytest.mark.parametrize(
    ("engine", "code", "starts"),
    [
        ("return 0", ExitCode.DRAINED, 1),
        ("return 2", ExitCode.WRONG_OPTIONS, 1),
        ("return 3", ExitCode.START_FAILED, 1),
        ("return 3 if number == 1 else number == 0", ExitCode.DRAINED, 3),
        ("return 1 if number < 2 else 0", ExitCode.DRAINED, 3),
        ("raise RuntimeError('a bug')", ExitCode.TOO_MANY_RESTARTS, 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", ExitCode.TOO_MANY_RESTARTS, 4),
    ],
)
def test_faults_and_signals_start_it_again_and_what_cannot_heal_does_not(
    tmp_path, engine, code, starts
):
    assert exit_code(tmp_path, engine) == code
    assert num_starts(tmp_path) == starts


def test_sigterm_is_passed_on_and_both_end(tmp_path):
    process = start(tmp_path, "time.sleep(60)")
    child = pid_of_start(tmp_path, 0)
    process.terminate()
    assert process.wait(30) == ExitCode.DRAINED
    wait_until_gone(child)
    assert num_starts(tmp_path) == 1


def test_the_engine_is_in_a_session_of_its_own_so_that_ctrl_c_reaches_it_once(tmp_path):
    """A second signal would abort its requests."""
    process = start(tmp_path, "time.sleep(60)")
    child = pid_of_start(tmp_path, 0)
    assert os.getsid(child) == child != os.getsid(process.pid)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == ExitCode.DRAINED
    wait_until_gone(child)


def test_sigterm_while_it_waits_to_start_again_ends_it(tmp_path):
    process = start(tmp_path, "time.sleep(0.05); return 1")
    pid_of_start(tmp_path, 2)
    time.sleep(0.3)  # a second is waited behind the third death
    process.terminate()
    assert process.wait(30) == ExitCode.DRAINED
    assert num_starts(tmp_path) == 3


def test_an_engine_that_does_not_drain_is_killed(tmp_path):
    program = "import engine_core.process.supervisor as s; s._GRACE_S = 0.2\n" + PROGRAM
    engine = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", program.replace("ENGINE", engine), str(tmp_path)]
    )
    child = pid_of_start(tmp_path, 0)
    time.sleep(0.2)
    process.terminate()
    assert process.wait(30) == ExitCode.FAULT
    wait_until_gone(child)


def test_a_killed_parent_takes_the_engine_with_it(tmp_path):
    process = start(tmp_path, "time.sleep(60)")
    child = pid_of_start(tmp_path, 0)
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_until_gone(child)


@pytest.mark.parametrize("by_oom_killer", [True, False])
def test_only_a_kill_for_want_of_memory_counts_for_the_requests_in_flight(tmp_path, by_oom_killer):
    """A file takes the place of the kernel's counter."""
    engine = f"""
    if number == 3:
        (folder / "suspects").write_text(f"{{suspects.is_suspect(7)}} {{suspects.refused}}")
        return 0
    suspects.begin_step(0, [7])
    if {by_oom_killer}:
        (folder / "oom_kills").write_text("x" * (4 + number))
    os.kill(os.getpid(), signal.SIGKILL)
    """
    assert exit_code(tmp_path, engine) == ExitCode.DRAINED
    expected = "True {7}" if by_oom_killer else "False set()"
    assert (tmp_path / "suspects").read_text() == expected


def test_what_the_engine_started_ends_with_it(tmp_path):
    """Such as a compiler."""
    engine = """
    if number == 0:
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        (folder / "compiler").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    return 0"""
    assert exit_code(tmp_path, engine.strip()) == ExitCode.DRAINED
    wait_until_gone(int((tmp_path / "compiler").read_text()))


def test_without_its_owner_no_engine_is_started_again(tmp_path):
    owner = subprocess.Popen(["sleep", "600"])
    program = PROGRAM.replace("ENGINE", "time.sleep(0.3 if number else 60); return 1")
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path), str(owner.pid)])
    child = pid_of_start(tmp_path, 0)
    owner.kill()
    owner.wait()
    os.kill(child, signal.SIGKILL)
    assert process.wait(30) == ExitCode.DRAINED
    assert num_starts(tmp_path) == 1


AS_PROCESS_1 = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]


def test_as_process_1_it_reaps_orphans_and_passes_sigterm_on(tmp_path):
    """As in a container."""
    if subprocess.run([*AS_PROCESS_1, "true"], check=False).returncode:
        pytest.skip("this system gives no namespace of processes")
    engine = """
    for _ in range(3):
        if not os.fork():
            if not os.fork():
                time.sleep(0.2)
            os._exit(0)
        os.wait()
    def drained(*_):
        (folder / "drained").touch()
        os._exit(0)
    signal.signal(signal.SIGTERM, drained)
    time.sleep(60)"""
    program = PROGRAM.replace("    ENGINE", engine)
    process = subprocess.Popen([*AS_PROCESS_1, sys.executable, "-c", program, str(tmp_path)])
    try:
        pid_of_start(tmp_path, 0)
        [parent] = children_of(process.pid)
        time.sleep(1)
        [engine] = children_of(parent)  # no zombies
        os.kill(parent, signal.SIGTERM)
        assert process.wait(30) == ExitCode.DRAINED
        assert (tmp_path / "drained").exists()
    finally:
        process.kill()


def children_of(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
