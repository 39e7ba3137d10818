"""The list of this user's daemons outlives none of them."""

import subprocess
import sys

import pytest

from protocol.running_daemons import RunningDaemon, listed, note_keep_alive, running_daemons

KILLED = """
import os, signal
from protocol.running_daemons import RunningDaemon, listed
with listed(RunningDaemon(pid=os.getpid(), model="m", address="ipc:///x", files="/m")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def daemon(pid, started_s=0.0):
    return RunningDaemon(
        pid=pid, model="m", address="ipc:///x", files="/m.gguf", started_s=started_s
    )


def test_a_daemon_is_listed_while_it_runs_oldest_first_and_its_keep_alive_is_noted():
    assert running_daemons() == []
    with listed(daemon(2, started_s=2.0)), listed(daemon(1, started_s=1.0)):
        assert [each.pid for each in running_daemons()] == [1, 2]
        note_keep_alive(1, 300.0)
        note_keep_alive(1, 5.0)
        note_keep_alive(3, 5.0)
        assert [each.keep_alive_s for each in running_daemons()] == [5.0, None]
    assert running_daemons() == []


def test_a_killed_daemon_is_not_listed_and_its_file_is_removed(runtime):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    folder = runtime / "engine-core" / "daemons"
    assert len(list(folder.iterdir())) == 1
    assert running_daemons() == []
    assert list(folder.iterdir()) == []


def test_the_folder_is_private_and_none_is_no_fault(runtime):
    with listed(daemon(1)):
        assert (runtime / "engine-core").stat().st_mode & 0o077 == 0
    (runtime / "engine-core" / "daemons").rmdir()
    (runtime / "engine-core" / "daemons").write_text("in the way")
    with listed(daemon(1)):
        assert running_daemons() == []
