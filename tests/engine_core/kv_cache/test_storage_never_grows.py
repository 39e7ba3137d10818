"""The memory behind the blocks is taken once: what a cache hands out is always inside it."""

import torch
from paged_memory import Stream, compute, make_cache

from engine_core.kv_cache import PoolIds
from engine_core.model_runner.cache import BlockStorage
from kernels.backends import select_operations

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4


def test_all_blocks_are_allocated_at_the_start_and_none_later():
    """Sequences come, share, are swapped out and in and go, until every block has been used; the
    tensors are those of the start, and every id has its place in them. Proves S195."""
    ids, host_ids = PoolIds(NUM_BLOCKS), PoolIds(NUM_HOST_BLOCKS, NUM_BLOCKS + 1)
    storage = BlockStorage(select_operations(torch.device("cpu")), [128], ids, host_ids)
    (pool,) = storage.pools
    assert len(pool.device_blocks) == NUM_BLOCKS + 1
    assert len(pool.host_blocks) == NUM_HOST_BLOCKS
    places = pool.device_blocks.data_ptr(), pool.host_blocks.data_ptr()

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
    assert places == (pool.device_blocks.data_ptr(), pool.host_blocks.data_ptr())
