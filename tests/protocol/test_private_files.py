"""Files of others: none is followed, read, waited for or overwritten."""

import os
import stat
import threading
from pathlib import Path

import pytest

from protocol.private_files import (
    create_private_file,
    foreign_owner,
    make_private_folder,
    open_own_file,
    overwrite_private_file,
)


@pytest.fixture
def victim(tmp_path):
    file = tmp_path / "victim"
    file.write_text("mine")
    return file


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def as_another_user(monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12_345)


def test_a_folder_is_made_private_and_one_that_was_open_is_closed(tmp_path):
    folder = tmp_path / "a" / "b"
    make_private_folder(folder)
    assert mode_of(folder) == 0o700
    folder.chmod(0o777)
    make_private_folder(folder)
    assert mode_of(folder) == 0o700


def test_a_folder_that_is_a_link_or_a_file_or_anothers_is_refused_and_left_alone(
    tmp_path, victim, monkeypatch
):
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(there)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for each in (tmp_path / "link", tmp_path / "dangling", victim):
        with pytest.raises(OSError):
            make_private_folder(each)
    assert not (tmp_path / "nowhere").exists()
    as_another_user(monkeypatch)
    with pytest.raises(PermissionError, match="another user"):
        make_private_folder(there)
    assert mode_of(there) == 0o755


def test_a_file_that_is_made_replaces_a_link_and_nothing_behind_it(tmp_path, victim):
    link = tmp_path / "1.new"
    link.symlink_to(victim)
    with create_private_file(link) as file:
        file.write(b"x")
    assert victim.read_text() == "mine"
    assert not link.is_symlink()
    assert mode_of(link) == 0o600


@pytest.mark.parametrize("writes", [False, True])
def test_only_an_own_file_is_read_and_nothing_is_waited_for(tmp_path, victim, monkeypatch, writes):
    with open_own_file(victim, writes=writes) as file:
        assert file.read() == b"mine"
    (tmp_path / "link").symlink_to(victim)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "absent", "."):
        with pytest.raises(OSError):
            open_own_file(tmp_path / name, writes=writes)
    as_another_user(monkeypatch)
    with pytest.raises(PermissionError, match="another user"):
        open_own_file(victim, writes=writes)


def test_what_is_overwritten_becomes_private_and_is_anothers_never(tmp_path, victim, monkeypatch):
    victim.chmod(0o644)
    (tmp_path / "own link").symlink_to(victim)
    overwrite_private_file(tmp_path / "own link").close()
    assert (victim.read_bytes(), mode_of(victim)) == (b"", 0o600)
    overwrite_private_file(tmp_path / "new").close()
    assert mode_of(tmp_path / "new") == 0o600
    victim.write_text("mine")
    if os.getuid() == 0:  # who can make a link of another user
        os.lchown(tmp_path / "own link", 12_345, 12_345)
        with pytest.raises(OSError):
            overwrite_private_file(tmp_path / "own link")
    as_another_user(monkeypatch)
    with pytest.raises(PermissionError, match="another user"):
        overwrite_private_file(victim)
    assert victim.read_text() == "mine"


def test_a_device_or_a_pipe_is_written_as_it_is(tmp_path):
    before = mode_of(Path(os.devnull))
    overwrite_private_file(Path(os.devnull)).close()
    assert mode_of(Path(os.devnull)) == before
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with overwrite_private_file(pipe) as file:
        file.write(b"line")
    reader.join()
    assert read == [b"line"]


def test_roots_files_are_trusted_and_those_of_others_are_not_also_by_root(victim, monkeypatch):
    status = os.stat_result((0o140600, 0, 0, 1, 1001, 0, 0, 0, 0, 0))
    monkeypatch.setattr(type(victim), "stat", lambda _path, **_: status)
    for user, foreign in ((1000, 1001), (0, 1001), (1001, None)):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        assert foreign_owner(victim) == foreign
    roots = os.stat_result((0o140600, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(type(victim), "stat", lambda _path, **_: roots)
    for user in (0, 1000):
        monkeypatch.setattr(os, "getuid", lambda user=user: user)
        assert foreign_owner(victim) is None
