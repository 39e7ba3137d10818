"""How many clients have room under the limit of descriptors."""

import resource

import pytest

from engine_core.errors import StartupError
from engine_core.server.descriptors import limit_clients

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
