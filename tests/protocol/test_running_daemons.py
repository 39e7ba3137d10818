"""The list of this user's daemons outlives none of them."""

import fcntl
import os
import subprocess
import sys

import pytest

from protocol.addresses import default_socket_folder
from protocol.running_daemons import RunningDaemon, listed, note_daemon, running_daemons

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
        note_daemon(1, keep_alive_s=300.0)
        note_daemon(1, keep_alive_s=5.0)
        note_daemon(3, keep_alive_s=5.0)
        assert [each.keep_alive_s for each in running_daemons()] == [5.0, None]
    assert running_daemons() == []


def test_a_killed_daemon_is_not_listed_and_its_file_is_removed(runtime):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    folder = runtime / "engine-core" / "daemons"
    assert len(list(folder.iterdir())) == 1
    assert running_daemons() == []
    assert list(folder.iterdir()) == []


@pytest.fixture
def folder(runtime):
    folder = runtime / "engine-core" / "daemons"
    folder.mkdir(parents=True)
    return folder


def test_links_that_others_have_made_before_are_not_followed(runtime, folder):
    victim = runtime / "victim"
    victim.write_text("mine")
    for name in ("1.new", "1.json", "2.json"):
        (folder / name).symlink_to(victim)
    with listed(daemon(1)):
        assert [each.pid for each in running_daemons()] == [1]
        note_daemon(2, keep_alive_s=5.0)
    assert victim.read_text() == "mine"
    for part in (folder, folder.parent):
        part.rename(runtime / "elsewhere")
        part.symlink_to(runtime / "elsewhere")
        with listed(daemon(1)):
            assert not list((runtime / "elsewhere").rglob("1.json"))
        part.unlink()
        (runtime / "elsewhere").rename(part)


@pytest.mark.parametrize(
    "content",
    [b"[" * 9999, b'{"a":' * 9999, b"", b"\xff", b'{"pid": 1}', b"1" * 9999],
    ids=["lists", "objects", "empty", "no text", "half", "digits"],
)
def test_an_entry_that_cannot_be_read_is_left_out(folder, content):
    entry = folder / "7.json"
    entry.write_bytes(content)
    os.mkfifo(folder / "8.json")
    with entry.open("rb") as held, listed(daemon(1)):
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [each.pid for each in running_daemons()] == [1]
        note_daemon(7, keep_alive_s=1.0)
    assert entry.read_bytes() == content


def test_a_runtime_folder_of_another_user_is_not_used(runtime, monkeypatch):
    assert default_socket_folder() == runtime / "engine-core"
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert default_socket_folder().name == "engine-core-12345"


def test_the_folder_is_private_and_none_is_no_fault(runtime):
    with listed(daemon(1)):
        assert (runtime / "engine-core").stat().st_mode & 0o077 == 0
    (runtime / "engine-core" / "daemons").rmdir()
    (runtime / "engine-core" / "daemons").write_text("in the way")
    with listed(daemon(1)):
        assert running_daemons() == []
