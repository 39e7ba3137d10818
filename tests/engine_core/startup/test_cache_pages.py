"""A cache's pages are there before anything is written, and nothing of them changes."""

import ctypes
import mmap
import os
import platform
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine_core.kv_cache import KVCacheGroupSpec, PoolIds
from engine_core.startup import cache_pages
from kernels.torch.operations import TorchOperations

NUM_BLOCKS = 5000
BLOCK_BYTES = 16384
KEYS = KVCacheGroupSpec()


def fresh_cache():
    """Zeros in memory that nobody has used: the C library may reuse what it has."""
    memory = mmap.mmap(-1, NUM_BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)


def none_filled():
    return 0


def share_of_resident_pages(tensor):
    """Of those that lie in it whole."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    pages = (ctypes.c_ubyte * (length // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    assert mincore(ctypes.c_void_p(first), ctypes.c_size_t(length), pages) == 0
    return sum(page & 1 for page in pages) / len(pages)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_all_pages_are_there_and_their_contents_stay():
    blocks = fresh_cache()
    blocks[7] = 5
    assert share_of_resident_pages(blocks) < 0.5
    cache_pages.populate_cache(blocks, NUM_BLOCKS, none_filled).join()
    assert share_of_resident_pages(blocks) == 1.0
    assert int(blocks.sum()) == 5 * BLOCK_BYTES


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of a system call")
@pytest.mark.parametrize(("is_spread", "policy"), [(True, 3), (False, 0)])  # interleave, default
def test_pages_lie_on_all_nodes_of_memory_by_option(is_spread, policy):
    found = ctypes.c_int(-1)

    def ask():  # in the thread that takes them
        ctypes.CDLL(None).syscall(239, ctypes.byref(found), None, 0, None, 0)  # get_mempolicy
        return NUM_BLOCKS

    cache_pages.populate_cache(fresh_cache(), 0, ask, is_spread=is_spread).join()
    assert found.value == policy


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_pages_stay_ahead_of_the_blocks_in_use_until_all_are_there(monkeypatch):
    monkeypatch.setattr(cache_pages, "_POLL_S", 0.01)
    filled = [0]
    blocks = fresh_cache()
    thread = cache_pages.populate_cache(blocks, 1000, lambda: filled[0])
    # of these blocks pages are to be there; at the third look some have been freed
    for filled[0], num_there in ((0, 1000), (1500, 2500), (700, 2500), (3000, 4000)):
        wait_until(lambda stop=num_there: share_of_resident_pages(blocks[:stop]) == 1.0)
        assert share_of_resident_pages(blocks[num_there + 500 :]) < 0.5
        assert thread.is_alive()
    filled[0] = NUM_BLOCKS - 1000
    thread.join(60)
    assert not thread.is_alive()
    assert share_of_resident_pages(blocks) == 1.0


def wait_until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_of_a_cache_whose_memory_nobody_gave_the_first_blocks_are_few(monkeypatch):
    free_bytes = 2**40
    monkeypatch.setattr(cache_pages, "available_memory_bytes", lambda: free_bytes)

    def blocks(pool=0, *, num_blocks=10**6, block_size=16, specs=(KEYS,), pool_bytes=(1000,)):
        config = SimpleNamespace(
            layout=SimpleNamespace(group_specs=specs, pool_bytes=pool_bytes),
            block_size=block_size,
            block_ids=PoolIds([num_blocks] * len(pool_bytes)),
        )
        return cache_pages.num_blocks_ahead(config, pool, is_given=False)

    assert blocks() == 1 + 32768 // 16
    assert blocks(block_size=24, specs=[KEYS] * 2) == 1 + 2 * 1366
    assert blocks(num_blocks=300) == 1 + 300
    assert blocks(pool_bytes=[2**20]) == 1 + 1024
    assert blocks(pool_bytes=[2**31]) == 1
    free_bytes = 2**35
    assert blocks(pool_bytes=[2**20]) == 1 + 64
    free_bytes = 2**30
    assert blocks(pool_bytes=[2**20]) == 1 + 32
    free_bytes = 2**40
    specs = [KEYS, KVCacheGroupSpec(2, pool=1)]
    assert blocks(1, specs=specs, pool_bytes=[1000, 1000]) == 1 + 32768 // 16
    assert blocks(1, specs=specs, pool_bytes=[1000, 2**24]) == 1 + 32


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_system_that_cannot_is_asked_once(monkeypatch, caplog):
    monkeypatch.setattr(cache_pages, "_POPULATE_WRITE", 12345)
    blocks = TorchOperations().allocate_blocks(64, 16384)
    with caplog.at_level("DEBUG", logger=cache_pages.__name__):
        cache_pages.populate_cache(blocks, 64, none_filled).join()
    assert [record.message for record in caplog.records] == [
        "the KV cache's pages come as they are written: Invalid argument"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_cache_that_is_given_back_gets_no_more_pages(monkeypatch):
    blocks = TorchOperations().allocate_blocks(64, 16384)
    asked = []

    class Library:
        def __init__(self, name, use_errno):
            def madvise(first, length, advice):
                asked.append(length)
                nonlocal blocks
                blocks = None
                time.sleep(0.1)  # until the call that began this has returned
                return 0

            self.madvise = madvise
            self.prctl = lambda *_: 0

    monkeypatch.setattr(cache_pages.ctypes, "CDLL", Library)
    monkeypatch.setattr(cache_pages, "_STRIDE_BYTES", 1 << 16)
    cache_pages.populate_cache(blocks, 64, none_filled).join()
    assert len(asked) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_who_gives_a_cache_back_waits_until_the_thread_lets_go(monkeypatch):
    blocks = TorchOperations().allocate_blocks(64, 16384)
    is_taking, forgotten = threading.Event(), weakref.ref(blocks)

    class Library:
        def __init__(self, name, use_errno):
            def madvise(first, length, advice):
                is_taking.set()
                time.sleep(0.3)
                return 0

            self.madvise = madvise
            self.prctl = lambda *_: 0

    monkeypatch.setattr(cache_pages.ctypes, "CDLL", Library)
    thread = cache_pages.populate_cache(blocks, 64, none_filled)
    assert is_taking.wait(60)
    del blocks
    assert forgotten() is not None
    cache_pages.end_taking()
    assert forgotten() is None
    thread.join(60)


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_cache_that_is_given_back_ends_the_wait_for_it(monkeypatch):
    monkeypatch.setattr(cache_pages, "_POLL_S", 0.01)
    blocks = fresh_cache()
    thread = cache_pages.populate_cache(blocks, 64, none_filled)
    thread.join(0.2)
    assert thread.is_alive()
    del blocks
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_the_thread_has_no_low_priority_as_the_end_of_a_process_waits_for_it(monkeypatch):
    monkeypatch.setattr(cache_pages, "_POLL_S", 0.001)
    found = []

    def ask():  # in the thread that takes them
        thread = threading.get_native_id()
        found.append((os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)))
        return len(found)

    cache_pages.populate_cache(blocks := fresh_cache()[:8], 1, ask).join()
    assert len(blocks) == 8
    assert {*found} == {(os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0))}
