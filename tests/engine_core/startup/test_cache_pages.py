"""A cache's pages are there before anything is written, and nothing of them changes."""

import ctypes
import mmap
import sys
from types import SimpleNamespace

import pytest
import torch

from engine_core.startup import cache_pages
from kernels.torch.operations import TorchOperations

NUM_BLOCKS = 5000
"""A tensor of 41 MB: the C library always asks the system for so much, and reuses nothing."""


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
    keys, values = TorchOperations().allocate_kv_cache(NUM_BLOCKS, 16, 2, 64, torch.float32)
    keys[7] = 5.0
    assert share_of_resident_pages(keys) < 0.5
    assert share_of_resident_pages(values) < 0.5
    cache_pages.populate_cache([(keys, values)], NUM_BLOCKS).join()
    assert share_of_resident_pages(keys) == share_of_resident_pages(values) == 1.0
    assert float(keys.sum()) == 5.0 * keys[7].numel()
    assert not values.any()


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_the_first_blocks_pages_are_there_and_others_are_not_asked_for():
    keys, values = TorchOperations().allocate_kv_cache(NUM_BLOCKS, 16, 2, 64, torch.float32)
    cache_pages.populate_cache([(keys, values)], 1000).join()
    for tensor in (keys, values):
        assert share_of_resident_pages(tensor[:1000]) == 1.0
        assert share_of_resident_pages(tensor[2000:]) < 0.5


def test_of_a_cache_whose_memory_nobody_gave_the_first_blocks_are_few():
    def blocks(**numbers):
        sizes = {"num_blocks": 10**6, "num_groups": 1, "block_size": 16, "block_bytes": 1000}
        return cache_pages.num_blocks_ahead(SimpleNamespace(**sizes | numbers))

    assert blocks() == 1 + 32768 // 16
    assert blocks(block_size=24, num_groups=2) == 1 + 2 * 1366
    assert blocks(num_blocks=300) == 1 + 300
    assert blocks(block_bytes=2**20) == 1 + 1024
    assert blocks(block_bytes=2**31) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_a_system_that_cannot_is_asked_once(monkeypatch, caplog):
    monkeypatch.setattr(cache_pages, "_POPULATE_WRITE", 12345)
    tensors = [TorchOperations().allocate_kv_cache(64, 16, 2, 64, torch.float32)]
    with caplog.at_level("DEBUG", logger=cache_pages.__name__):
        cache_pages.populate_cache(tensors, 64).join()
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
            self.prctl = lambda *_: 0

    monkeypatch.setattr(cache_pages.ctypes, "CDLL", Library)
    monkeypatch.setattr(cache_pages, "_STRIDE_BYTES", 1 << 16)
    cache_pages.populate_cache(tensors, 64).join()
    assert len(asked) == 1
