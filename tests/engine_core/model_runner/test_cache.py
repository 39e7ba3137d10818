"""Copies between blocks, against a plain loop over the pairs."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache import CacheCopies, DiskMoves, PoolIds
from engine_core.model_runner.cache import BlockStorage, origin_of_each
from kernels.torch.operations import TorchOperations

POOLS = {
    "one pool": (PoolIds(6), PoolIds(4, 7), [64]),
    "two pools": (PoolIds([6, 3]), PoolIds([4, 2], 10), [64, 192]),
}


def pairs(sources, destinations):
    """Both of one pool."""
    pools = st.sampled_from(range(len(sources.sizes)))
    both = pools.flatmap(
        lambda pool: st.tuples(of_pool(sources, pool), of_pool(destinations, pool))
    )
    return st.lists(both, max_size=8)


def of_pool(ids, pool):
    first = ids.first_ids[pool]
    return st.integers(first, first + ids.sizes[pool] - 1)


@pytest.mark.parametrize("which", POOLS)
@given(data=st.data())
def test_lists_are_carried_out_in_order_and_pairs_from_first_to_last(which, data):
    """Proves S130, S196."""
    ids, host_ids, pool_bytes = POOLS[which]
    storage = BlockStorage(TorchOperations(), pool_bytes, ids, host_ids)
    memory = list(range(1 + ids.num_blocks + host_ids.num_blocks))
    places = {
        block_id: (pool.device_blocks if of_tier is ids else pool.host_blocks)[
            block_id - of_tier.first_ids[index] + (of_tier is ids)
        ]
        for of_tier in (ids, host_ids)
        for index, pool in enumerate(storage.pools)
        for block_id in of_tier.stack(index)
    }
    for block_id, block in places.items():
        block[:] = block_id
    swap_in, swap_out, copy = (
        data.draw(pairs(*tiers)) for tiers in ((host_ids, ids), (ids, host_ids), (ids, ids))
    )
    for source, destination in [*swap_in, *swap_out, *copy]:
        memory[destination] = memory[source]
    storage.carry_out(CacheCopies(swap_in=swap_in, swap_out=swap_out, copy=copy))
    assert all((block == memory[block_id]).all() for block_id, block in places.items())
    assert [len(block) for block in places.values()].count(64) == 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_all_pairs_at_once_leave_what_one_after_another_leaves(copies):
    memory = list(range(6))
    for source, destination in copies:
        memory[destination] = memory[source]
    at_once = list(range(6))
    for destination, origin in origin_of_each(copies).items():
        at_once[destination] = origin
    assert at_once == memory


def test_blocks_come_from_disk_and_go_there_by_pools():
    ids, host_ids, pool_bytes = POOLS["two pools"]
    storage = BlockStorage(TorchOperations(), pool_bytes, ids, host_ids)
    saved = {}
    storage.attach_disk(
        SimpleNamespace(
            load=lambda key: bytes([key[0] + 1]) * pool_bytes[key[0]],
            save=lambda key, index, contents: saved.__setitem__((key, index), contents),
        )
    )
    storage.carry_out(CacheCopies(disk=DiskMoves([((0, b"a"), 6), ((1, b"b"), 7)], [])))
    moves = DiskMoves([], [((0, b"a"), 4, 6), ((1, b"b"), 5, 7)])
    storage.carry_out(CacheCopies(copy=[(7, 9)], disk=moves))
    assert saved == {((0, b"a"), 4): b"\1" * 64, ((1, b"b"), 5): b"\2" * 192}
    assert storage.pools[1].device_blocks[:, 0].tolist() == [0, 2, 0, 2]


def test_without_host_blocks_there_is_no_host_memory():
    storage = BlockStorage(TorchOperations(), [64], PoolIds(6), PoolIds(0, 7))
    assert not len(storage.pools[0].host_blocks)
    storage.carry_out(CacheCopies(copy=[(1, 2)]))
    storage.carry_out(CacheCopies())
