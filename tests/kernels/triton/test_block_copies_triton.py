"""Swaps through staging memory: the order of two streams, and the host memory that is taken."""

import random

import pytest
import torch

from kernels.triton import block_copies, host_memory
from kernels.triton.block_copies import TritonBlockCopier, runs_of

CPU = torch.device("cpu")
NUM_BLOCKS, NUM_HOST_BLOCKS = 12, 7
FIRST_OF_HOST = 13


class ShuffledLanes:
    """Does work as late as it likes, in each lane in order, and not before what it waits for."""

    def __init__(self, seed):
        self.waiting = {"compute": [], "travel": []}
        self.done = set()
        self.draw = random.Random(seed)
        self.num_submitted = 0

    def compute(self, work, after=None):
        return self._submit("compute", work, after)

    def travel(self, work, after=None):
        return self._submit("travel", work, after)

    def _submit(self, lane, work, after):
        self.num_submitted += 1
        self.waiting[lane].append((self.num_submitted, work, after))
        return self.num_submitted

    def finish(self):
        while any(self.waiting.values()):
            ready = [
                lane
                for lane, works in self.waiting.items()
                if works and (works[0][2] is None or works[0][2] in self.done)
            ]
            number, work, _ = self.waiting[self.draw.choice(ready)].pop(0)
            work()
            self.done.add(number)


def ids(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def make(lanes, staging_blocks=2):
    blocks = torch.arange(1, NUM_BLOCKS + 1).to(torch.uint8)[:, None].repeat(1, 192)
    copier = TritonBlockCopier(
        blocks, NUM_HOST_BLOCKS, lanes=lanes, staging_bytes=staging_blocks * 192
    )
    copier.host_blocks.copy_(FIRST_OF_HOST + torch.arange(NUM_HOST_BLOCKS)[:, None])
    return copier, blocks


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("staging_blocks", [1, 2, 5])
def test_however_late_a_stream_is_every_block_arrives_whole(seed, staging_blocks):
    lanes, draw = ShuffledLanes(seed), random.Random(seed)
    copier, memory = make(lanes, staging_blocks)
    device = list(range(1, NUM_BLOCKS + 1))
    host = list(range(FIRST_OF_HOST, FIRST_OF_HOST + NUM_HOST_BLOCKS))
    for _ in range(8):
        number = draw.randint(1, NUM_HOST_BLOCKS)
        blocks = draw.sample(range(NUM_BLOCKS), number)
        hosts = draw.sample(range(NUM_HOST_BLOCKS), number)
        if draw.random() < 0.5:
            copier.swap_out(ids(*blocks), ids(*hosts))
            for block, place in zip(blocks, hosts, strict=True):
                host[place] = device[block]
        else:
            copier.swap_in(ids(*hosts), ids(*blocks))
            for block, place in zip(blocks, hosts, strict=True):
                device[block] = host[place]
        overwritten = draw.randrange(NUM_BLOCKS)  # a step writes as soon as the call is queued
        device[overwritten] = 0
        lanes.compute(lambda at=overwritten: memory[at].zero_())
    lanes.finish()
    for blocks, numbers in ((memory, device), (copier.host_blocks, host)):
        assert (blocks == torch.tensor(numbers)[:, None]).all()


def test_blocks_that_follow_one_another_in_host_memory_travel_as_one():
    assert runs_of([3, 4, 7, 8, 9]) == [(0, 3, 2), (2, 7, 3)]
    assert runs_of([5]) == [(0, 5, 1)]
    assert runs_of([]) == []


def test_ids_are_sent_once_and_one_launch_copies_all_of_them(monkeypatch):
    copier, _ = make(None)
    launches, sent = [], []
    kernel, send = block_copies.move_blocks_kernel, copier._send

    class Counting:
        def __getitem__(self, grid):
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(block_copies, "move_blocks_kernel", Counting())
    monkeypatch.setattr(copier, "_send", lambda each: sent.append(each) or send(each))
    copier.copy(ids(1, 2), ids(3, 4))
    assert (len(launches), len(sent)) == (1, 2)
    copier.swap_out(ids(1, 2, 3), ids(0, 1, 2))
    assert (len(launches), len(sent)) == (3, 4), "a launch and a transfer of ids for each part"


class FakeRuntime:
    def __init__(self, error=0):
        self.error, self.locked = error, {}

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        del self.locked[address]


@pytest.mark.parametrize("num_bytes", [640 << 10, (640 << 10) + 8])
def test_exactly_what_was_asked_for_is_page_locked_until_nothing_uses_it(monkeypatch, num_bytes):
    runtime = FakeRuntime()
    waited = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    memory = host_memory.pinned_memory(num_bytes, torch.device("cuda", 0))
    assert list(runtime.locked.items()) == [(memory.data_ptr(), num_bytes)]
    assert memory.shape == (num_bytes,)
    view = memory.view(torch.int64)[3:]
    view.fill_(7)
    del memory
    assert runtime.locked
    assert view.sum() == 7 * len(view)
    del view
    assert not runtime.locked
    assert waited == [torch.device("cuda", 0)]


def test_memory_that_cannot_be_page_locked_is_refused_with_its_size(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=2))
    with pytest.raises(MemoryError, match=r"0\.5 GiB .*CUDA error 2.*--host-cache-memory"):
        host_memory.pinned_memory(512 << 20, torch.device("cuda", 0))


def test_without_host_blocks_nothing_is_locked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeRuntime(error=2))
    assert host_memory.pinned_memory(0, torch.device("cuda", 0)).numel() == 0
