"""A cache's pages are there before anything is written, and nothing of them changes."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from engine_core.startup import cache_pages
from kernels.torch.operations import TorchOperations

NUM_BLOCKS = 1000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_all_pages_are_there_and_their_contents_stay():
    ops = TorchOperations()
    tensors = [ops.allocate_kv_cache(NUM_BLOCKS, 16, 2, 64, torch.float32) for _ in range(3)]
    block_bytes = 2 * len(tensors) * tensors[0][0][0].nbytes
    tensors[1][0][7] = 5.0
    before = resident_bytes()
    thread = cache_pages.populate_cache(tensors)
    thread.join()
    taken = resident_bytes() - before
    # some were there, and with huge pages a few more come
    assert 0.9 * NUM_BLOCKS * block_bytes <= taken <= 1.5 * NUM_BLOCKS * block_bytes
    assert float(tensors[1][0].sum()) == 5.0 * tensors[1][0][7].numel()
    assert not any(bool(tensor.any()) for tensor in (*tensors[0], *tensors[2]))


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_system_that_cannot_is_asked_once(monkeypatch, caplog):
    monkeypatch.setattr(cache_pages, "_POPULATE_WRITE", 12345)
    tensors = [TorchOperations().allocate_kv_cache(64, 16, 2, 64, torch.float32)]
    with caplog.at_level("DEBUG"):
        cache_pages.populate_cache(tensors).join()
    assert [record.message for record in caplog.records] == [
        "the KV cache's pages come as they are written: Invalid argument"
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_cache_that_is_given_back_gets_no_more_pages(monkeypatch):
    tensors = [TorchOperations().allocate_kv_cache(64, 16, 2, 64, torch.float32)]
    asked = []

    class Library:
        def __init__(self, name, use_errno):
            def madvise(first, length, advice):
                asked.append(length)
                tensors.clear()
                return 0

            self.madvise = madvise

    monkeypatch.setattr(cache_pages.ctypes, "CDLL", Library)
    monkeypatch.setattr(cache_pages, "_STRIDE_BYTES", 1 << 16)
    cache_pages.populate_cache(tensors).join()
    assert len(asked) == 1
