"""How many clients have room under the limit of descriptors, and the guard of the last ones."""

import contextlib
import errno
import os
import resource
import threading
import time

import pytest
import zmq

from engine_core.errors import StartupError
from engine_core.server import descriptors
from engine_core.server.descriptors import limit_clients
from engine_core.server.transport import ZmqTransport

INFINITE = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch):
    """The process's soft and hard limit; nothing real is changed."""
    now = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _what: tuple(now))

    def set_limits(_what, pair):
        now[:] = pair

    monkeypatch.setattr(resource, "setrlimit", set_limits)
    return now


def test_the_soft_limit_becomes_the_hard_one(limits):
    assert limit_clients(1024) == 1024
    assert limits == [4096, 4096]


def test_clients_without_room_are_not_promised(limits, caplog):
    limits[1] = 1024
    for name in (None, "engine_core"):
        caplog.set_level("WARNING", name)
    assert limit_clients(1024) == 704
    assert "--max-clients is lowered from 1024 to 704" in caplog.text


@pytest.mark.parametrize("soft", [256, INFINITE])
def test_an_infinite_limit_becomes_a_number(limits, soft):
    limits[:] = [soft, INFINITE]
    assert limit_clients(1024) == 1024
    assert limits == [10_240, INFINITE]


def test_no_room_for_any_client_is_one_clear_line(limits):
    limits[1] = 64
    with pytest.raises(StartupError, match=r"may open 64 files, it needs 320 .* raise the limit"):
        limit_clients(1)


@pytest.fixture
def full_after_one(tmp_path, monkeypatch):
    """An engine's socket, which is hidden while another client is connected."""
    path = tmp_path / "s"
    with ZmqTransport(f"ipc://{path}"):
        limit = descriptors.lowest_free() + descriptors.LATE + 2  # taken by the client
        monkeypatch.setattr(descriptors, "_most_descriptors", lambda: limit)
        yield path


@contextlib.contextmanager
def connected(path):
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(f"ipc://{path}")
        yield


def wait_until(condition):
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_socket_without_room_is_hidden_until_a_client_leaves(full_after_one):
    for _ in range(3):
        with connected(full_after_one):
            wait_until(lambda: not full_after_one.exists())
        wait_until(full_after_one.exists)


def test_it_comes_back_also_after_a_moment_without_any_descriptor(full_after_one, monkeypatch):
    failed, really_open = [], os.open

    def open_without_descriptor(*arguments, **options):
        if len(failed) < 3:
            failed.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return really_open(*arguments, **options)

    with connected(full_after_one):
        wait_until(lambda: not full_after_one.exists())
        monkeypatch.setattr(os, "open", open_without_descriptor)
        wait_until(lambda: len(failed) == 3)
    wait_until(full_after_one.exists)


def test_a_hidden_socket_that_somebody_removes_does_not_end_the_guard(full_after_one):
    hidden = full_after_one.with_name("s.full")
    with connected(full_after_one):
        wait_until(hidden.exists)
        hidden.unlink()
    time.sleep(0.5)
    assert "descriptors" in {thread.name for thread in threading.enumerate()}
