"""The memory behind the blocks is taken once: what a cache hands out is always inside it."""

from types import SimpleNamespace

import torch
from paged_memory import Stream, compute, make_cache

from engine_core.model_runner.cache import BlockStorage
from kernels.backends import select_operations

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4


def test_all_blocks_are_allocated_at_the_start_and_none_later():
    """Sequences come, share, are swapped out and in and go, until every block has been used; the
    tensors are those of the start, and every id has its place in them. Proves S195."""
    storage = BlockStorage(
        SimpleNamespace(
            ops=select_operations(torch.device("cpu")),
            num_blocks=NUM_BLOCKS,
            num_host_blocks=NUM_HOST_BLOCKS,
            block_bytes=128,
        )
    )
    assert len(storage.device_blocks) == NUM_BLOCKS + 1
    assert len(storage.host_blocks) == NUM_HOST_BLOCKS
    places = storage.device_blocks.data_ptr(), storage.host_blocks.data_ptr()

    cache = make_cache(NUM_BLOCKS, num_host_blocks=NUM_HOST_BLOCKS)
    used: set[int] = set()
    for number in range(12):
        stream = Stream(f"s{number}", list(range(number % 3 * 50, number % 3 * 50 + 15)))
        assert cache.allocate_slots(stream, 15) is not None
        stream.num_computed_tokens = 15
        storage.carry_out(cache.take_copies())
        if cache.swap_out([stream]) is not None:
            storage.carry_out(cache.take_copies())
            cache.swap_in([stream])
            storage.carry_out(cache.take_copies())
        used.update(cache.block_ids(stream)[0])
        cache.free(stream)
        storage.carry_out(cache.take_copies())
        cache.check()
    assert used == set(range(1, NUM_BLOCKS + 1))
    assert compute(cache, Stream("too long", list(range(4 * NUM_BLOCKS + 1)))) is None
    assert places == (storage.device_blocks.data_ptr(), storage.host_blocks.data_ptr())
