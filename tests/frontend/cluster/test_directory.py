"""Which engines there are: reports, farewells, silence, a restart."""

import asyncio

import pytest

from frontend.cluster import directory as module
from frontend.cluster.directory import EngineDirectory


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "REPORT_S", 0.01)


async def test_who_asks_hears_of_a_change_at_once(clock):
    directory = EngineDirectory({}, clock=clock)
    first = await directory.changes()
    assert first.addresses == {}
    waiting = asyncio.create_task(directory.changes(first.version))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await directory.report("m", "tcp://a:1")
    second = await waiting
    assert second.addresses == {"m": ["tcp://a:1"]}
    await directory.report("m", "tcp://a:1")
    await directory.report("n", "tcp://b:1")
    third = await directory.changes(second.version)
    assert third.addresses == {"m": ["tcp://a:1"], "n": ["tcp://b:1"]}
    await directory.leave("m", "tcp://a:1")
    await directory.leave("m", "tcp://a:1")
    assert (await directory.changes(third.version)).addresses == {"n": ["tcp://b:1"]}


async def test_a_replica_that_reports_no_more_is_forgotten(clock):
    directory = EngineDirectory({}, clock=clock)
    await directory.report("m", "tcp://a:1")
    await directory.report("m", "tcp://b:1")
    known = await directory.changes()
    clock.now_s += 8
    await directory.report("m", "tcp://b:1")
    clock.now_s += 8
    assert (await directory.changes(known.version)).addresses == {"m": ["tcp://b:1"]}


async def test_without_a_change_the_answer_comes_in_time_and_is_the_same(clock):
    directory = EngineDirectory({}, clock=clock)
    known = await directory.changes()
    waiting = asyncio.create_task(directory.changes(known.version))
    await asyncio.sleep(0)
    clock.now_s += 11
    assert await waiting == known


async def test_after_a_restart_nobody_is_told_that_engines_are_gone(clock):
    before = EngineDirectory({}, clock=clock)
    await before.report("m", "tcp://a:1")
    known = await before.changes()
    clock.now_s += 1
    after = EngineDirectory({}, is_restarted=True, clock=clock)
    waiting = asyncio.create_task(after.changes(known.version))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await after.report("m", "tcp://a:1")
    clock.now_s += 5
    assert (await waiting).addresses == {"m": ["tcp://a:1"]}
