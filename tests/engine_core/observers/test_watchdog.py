"""A loop that hangs is noticed, reported once, and ended where it is started again."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from engine_core.errors import ExitCode
from engine_core.observers.base import Progress
from engine_core.observers.watchdog import Watchdog

pytestmark = pytest.mark.slow

TIMEOUT_S = 0.2


def step(step_id, num_tokens):
    batch = SimpleNamespace(req_ids=["first", "second"], num_scheduled_tokens=np.array([3, 1]))
    plan = SimpleNamespace(step_id=step_id, total_num_scheduled_tokens=num_tokens, batch=batch)
    return SimpleNamespace(plan=plan, sent_s=float(step_id))


@pytest.fixture
def reports(tmp_path, monkeypatch, caplog):
    """Paths named in the log so far."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    caplog.set_level(logging.ERROR)
    return lambda: [Path(path) for path in re.findall(r"are in (\S+);", caplog.text)]


def watch(progress, numbers=lambda: "num_running 2"):
    return Watchdog(progress, timeout_s=TIMEOUT_S, numbers=numbers, ends_process=False)


def wait_for(condition):
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_steps_of_tokens_and_idleness_are_progress_and_an_empty_step_with_work_is_none():
    has_work = True
    progress = Progress(lambda: has_work, 0.0)
    progress.on_step(step(4, 3))
    assert (progress.num_steps, progress.step_id, progress.at_s) == (1, 4, 4.0)
    progress.on_step(step(5, 0))
    assert (progress.num_steps, progress.step_id, progress.at_s) == (1, 4, 4.0)
    has_work = False
    progress.on_step(step(6, 0))
    assert (progress.num_steps, progress.step_id, progress.at_s) == (2, 4, 6.0)


def test_a_hang_is_reported_once_with_plans_numbers_and_stacks(reports):
    progress = Progress(lambda: True, 0.0)
    for number in range(20):
        progress.on_plan(step(number, 4).plan, 0.0)
    with watch(progress):
        wait_for(reports)
        time.sleep(3 * TIMEOUT_S)
    [path] = reports()
    text = path.read_text()
    assert "step 19: 4 tokens: first 3, second 1" in text
    assert "step 11" not in text  # the last 8
    assert "num_running 2" in text
    assert "test_watchdog.py" in text.partition("# stacks")[2]
    assert path.stat().st_mode & 0o077 == 0


def test_progress_makes_it_watch_again(reports):
    progress = Progress(lambda: True, 0.0)
    with watch(progress):
        wait_for(lambda: len(reports()) == 1)
        progress.on_step(step(1, 1))
        wait_for(lambda: len(reports()) == 2)


def test_no_report_while_there_is_progress(reports):
    progress = Progress(lambda: True, 0.0)
    with watch(progress):
        for number in range(40):
            progress.on_step(step(number, 1))
            time.sleep(TIMEOUT_S / 20)
    assert not reports()


def test_numbers_that_cannot_be_read_do_not_spoil_the_report(reports):
    def numbers():
        raise RuntimeError("dictionary changed size")

    with watch(Progress(lambda: True, 0.0), numbers):
        wait_for(reports)
    assert "cannot be read: RuntimeError('dictionary changed size')" in reports()[0].read_text()


PROGRAM = """
import sys, time
from engine_core.observers.base import Progress
from engine_core.observers.watchdog import Watchdog

progress = Progress(lambda: True, 0.0)
with Watchdog(progress, timeout_s=1.0, numbers=str, ends_process=True):
    print("ready", flush=True)
    LOOP
"""


def started(loop):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("LOOP", loop)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("loop", ["time.sleep(60)", "while True: pass"])
def test_a_hung_engine_is_ended_if_asked_for(loop, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert started(loop).wait(30) == ExitCode.NO_PROGRESS
    assert len(list(tmp_path.iterdir())) == 1


def test_a_report_that_cannot_be_written_is_said_and_the_stacks_go_to_stderr():
    program = "import tempfile; tempfile.tempdir = '/no/such/folder'\n" + PROGRAM
    done = subprocess.run(
        [sys.executable, "-c", program.replace("LOOP", "time.sleep(60)")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ExitCode.NO_PROGRESS
    assert "the report cannot be written: [Errno 2]" in done.stderr
    assert 'File "<string>"' in done.stderr


def test_a_stopped_process_that_goes_on_does_not_hang():
    """SIGSTOP: time passes, and nothing could run."""
    loop = "for _ in range(30): progress.num_steps += 1; time.sleep(0.1)"
    process = started(loop)
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2)
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(30) == 0
