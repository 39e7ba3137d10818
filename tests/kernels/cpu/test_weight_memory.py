"""Memory that is touched before weights are packed into it."""

import mmap
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kernels.cpu import weight_memory
from kernels.cpu.weight_memory import WeightMemory

MIB = 1 << 20


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_is_reserved_is_aligned_and_apart_and_keeps_its_numbers():
    memory = WeightMemory()
    memory.touch_ahead(48 * MIB, needed_bytes=64 * MIB)
    sizes = (1, 63, 64, 65, 20 * MIB, 70 * MIB, 5)  # the sixth does not fit
    tensors = [memory.reserve(size) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    memory.give_back()
    later = memory.reserve(3 * MIB).fill_(99)
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.dtype is torch.uint8
        assert tensor.shape == (size,)
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == number + 1).all())
    assert bool((later == 99).all())


def test_touching_ends_when_memory_is_reserved(monkeypatch):
    monkeypatch.setattr(weight_memory, "_TOUCHED_AT_ONCE", 4096)
    gate, before = threading.Event(), threading.Thread(target=lambda: gate.wait(30))
    before.start()
    memory = WeightMemory()
    memory.touch_ahead(256 * MIB, needed_bytes=256 * MIB, after=before)
    threading.Timer(0.05, gate.set).start()
    mine = memory.reserve(256 * MIB)
    mine[:: mmap.PAGESIZE] = 7
    assert bool((mine[:: mmap.PAGESIZE] == 7).all())


def test_what_nothing_was_reserved_of_goes_back_to_the_system():
    before_bytes = resident_bytes()
    memory = WeightMemory()
    memory.touch_ahead(200 * MIB, needed_bytes=400 * MIB)
    kept = memory.reserve(8 * MIB).fill_(1)
    memory.end_touching()
    torch.frombuffer(memory.chunk, dtype=torch.uint8)[memory.used :].fill_(1)
    assert resident_bytes() - before_bytes > 350 * MIB
    memory.give_back()
    assert resident_bytes() - before_bytes < 50 * MIB
    assert bool((kept == 1).all())


def test_memory_that_the_system_does_not_give_is_not_touched_and_refused_when_it_is_asked_for():
    memory = WeightMemory()
    memory.touch_ahead(1 << 60, needed_bytes=1 << 60)
    assert len(memory.reserve(5)) == 5
    with pytest.raises(MemoryError, match="1099511627776 MiB for weights"):
        memory.reserve(1 << 60)


def test_it_needs_no_torch_to_touch():
    program = """
import sys
from kernels.cpu.weight_memory import WEIGHT_MEMORY
WEIGHT_MEMORY.touch_ahead(40 << 20, needed_bytes=80 << 20)
print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.split() == [b"False"]
