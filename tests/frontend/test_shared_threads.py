"""Owners take threads in turn."""

import asyncio
import os
import threading

import pytest

from frontend.errors import QueueFull
from frontend.http.api_errors import api_error
from frontend.shared_threads import SharedThreads, current_owner


class Calls:
    """Calls that run until they are told to end."""

    def __init__(self, threads):
        self._threads = threads
        self.begun = []
        self.end = threading.Event()

    def start(self, owner, name):
        async def run():
            current_owner.set(owner)
            return await self._threads.run(lambda: self._call(name))

        return asyncio.create_task(run())

    def _call(self, name):
        self.begun.append(name)
        assert self.end.wait(10)
        return name

    async def until_begun(self, number):
        for _ in range(500):
            if len(self.begun) >= number:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        return self.begun


async def test_an_owner_leaves_a_thread_to_others():
    calls = Calls(SharedThreads("work", 3, 10))
    mine = [calls.start("ann", number) for number in range(5)]
    assert await calls.until_begun(2) == [0, 1]
    other = calls.start("bob", "b")
    assert await calls.until_begun(3) == [0, 1, "b"]
    calls.end.set()
    assert await asyncio.gather(*mine, other) == [0, 1, 2, 3, 4, "b"]


async def test_owners_take_turns():
    calls = Calls(SharedThreads("work", 1, 10))
    tasks = [calls.start("ann", f"a{number}") for number in range(3)]
    tasks += [calls.start("bob", f"b{number}") for number in range(2)]
    await calls.until_begun(1)
    calls.end.set()
    await asyncio.gather(*tasks)
    assert calls.begun == ["a0", "a1", "b0", "a2", "b1"]


async def test_only_so_many_of_an_owner_wait_and_the_next_is_told_to_come_later():
    calls = Calls(SharedThreads("chat templates", 2, 3))
    tasks = [calls.start("ann", number) for number in range(4)]
    await calls.until_begun(1)
    with pytest.raises(QueueFull, match="3 requests of 'ann' wait for chat templates") as error:
        await calls.start("ann", 4)
    assert api_error(error.value).status == 429
    tasks.append(calls.start("bob", "b"))
    calls.end.set()
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3, "b"]


async def test_this_programs_own_calls_take_all_threads_and_have_no_limit():
    calls = Calls(SharedThreads("work", 2, 1))
    tasks = [calls.start(None, number) for number in range(9)]
    assert await calls.until_begun(2) == [0, 1]
    calls.end.set()
    assert await asyncio.gather(*tasks) == list(range(9))


async def test_whoever_stops_waiting_takes_no_turn_and_counts_no_more():
    calls = Calls(SharedThreads("work", 1, 1))
    first, second = calls.start("ann", 0), calls.start("ann", 1)
    await calls.until_begun(1)
    second.cancel()
    await asyncio.wait([second])
    third = calls.start("ann", 2)
    await asyncio.sleep(0)
    calls.end.set()
    assert await asyncio.gather(first, third) == [0, 2]
    assert calls.begun == [0, 2]


async def test_an_error_reaches_whoever_waits_and_the_thread_goes_on():
    threads = SharedThreads("work", 1, 1)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    assert await threads.run(lambda: 1) == 1


async def test_a_forked_child_has_threads_of_its_own():
    threads = SharedThreads("work", 1, 1)
    assert await threads.run(lambda: 1) == 1
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        asyncio.set_event_loop(None)
        asyncio._set_running_loop(None)
        os.write(writer, bytes([asyncio.run(threads.run(lambda: 7))]))
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 1) == bytes([7])
