"""What taking and evicting blocks costs does not grow with the blocks that are free or cached.
Proves S104."""

import pytest

from engine_core.kv_cache import block_pool
from engine_core.kv_cache.block_pool import BlockPool, EvictedHashes
from tests.engine_core.lines_run import lines_run


def cached_pool(num_blocks: int, num_cached: int) -> BlockPool:
    pool = BlockPool(num_blocks=num_blocks)
    blocks = pool.allocate(num_cached)
    pool.register_run(blocks, 0, [b"%d" % each for each in blocks], 0, num_cached)
    pool.release(blocks)
    return pool


@pytest.mark.parametrize("share_cached", [0.0, 1.0])
def test_taking_blocks_to_copy_into_costs_the_same_in_a_larger_pool(share_cached):
    costs = []
    for num_blocks in (20, 2000):
        pool = cached_pool(num_blocks, int(share_cached * num_blocks))
        costs.append(lines_run(lambda pool=pool: pool.allocate(3, avoid={1, 2, 3})))
        pool.check()
    assert abs(costs[0] - costs[1]) < 12  # which of those to avoid are met


def test_blocks_to_avoid_keep_their_places():
    pool = cached_pool(9, 4)  # 5 to 9 are empty, 5 is next; 1 to 4 cached, 1 the oldest
    assert pool.allocate(6, avoid={5, 7, 2}) == [6, 8, 9, 1, 3, 4]
    pool.check()
    assert pool.num_free == 3
    assert pool.allocate(2) == [5, 7]


def test_evicting_and_asking_cost_no_more_with_millions_of_blocks(monkeypatch):
    sorted_together, asked = [], []
    monkeypatch.setattr(
        block_pool,
        "sorted",
        lambda keys: sorted_together.append(len(keys)) or sorted(keys),
        raising=False,
    )
    holds = block_pool._holds
    monkeypatch.setattr(block_pool, "_holds", lambda *case: asked.append(1) or holds(*case))
    evicted = EvictedHashes(40_000_000)
    names = [number.to_bytes(8, "little") for number in range(50_000)]
    for start in range(0, len(names), 100):
        evicted.add(*names[start : start + 100])
    assert all(name in evicted for name in names[::997])
    asked.clear()
    assert b"never" not in evicted
    assert max(sorted_together) <= 16_384
    assert len(asked) <= 64
