"""The number of KV blocks: asked for, given as memory, or from what is free."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import CacheTooSmall, ConfigurationError
from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.startup import memory
from engine_core.startup.memory import (
    HostMemory,
    PoolShares,
    RequestBlocks,
    checkpoint_interval,
    choose_num_blocks,
    choose_num_host_blocks,
    fit_max_model_len,
)

MIB = 1024**2


@pytest.fixture(autouse=True)
def hundred_megabytes(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 * MIB)


KEYS = KVCacheGroupSpec()
STATES = KVCacheGroupSpec(2, is_sparse=True, pool=1)


def shares(groups=(KEYS,), pool_bytes=(MIB,), *, max_model_len=40, watermark=0.0, max_num_seqs=4):
    return PoolShares(
        pool_bytes=pool_bytes,
        request=RequestBlocks(groups, 8, 4),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        watermark=watermark,
    )


def choose(num_blocks=None, kv_cache_memory=None, memory_fraction=0.5, pools=None, mapped_bytes=0):
    return choose_num_blocks(
        HostMemory(mapped_bytes),
        pools or shares(),
        step_bytes=20 * MIB,
        num_blocks=num_blocks,
        kv_cache_memory=kv_cache_memory,
        memory_fraction=memory_fraction,
    )


def test_free_memory_less_a_steps_activations_is_used():
    assert choose() == 30
    assert choose(mapped_bytes=40 * MIB) == 10  # the system counts what can be read again


@pytest.mark.parametrize(("num_keys", "num_states"), [(4, 4), (40, 10), (60, 15), (200, 16)])
def test_a_small_cache_has_states_for_a_few_sequences(num_keys, num_states):
    """Up to four each; a state is as large as the keys of 300 blocks, and requests are long."""
    pools = shares((KEYS, STATES), (MIB, 300 * MIB), max_model_len=4096, max_num_seqs=64)
    assert pools.beside(num_keys) == [num_keys, num_states]


def test_no_more_than_the_requests_can_use():
    assert choose(memory_fraction=1.0) == 60


def test_wishes_are_granted_exactly():
    assert choose(num_blocks=7) == 7
    assert choose(kv_cache_memory=7 * MIB + 5) == 7


def test_wishes_that_contradict_or_exceed_the_memory_are_refused():
    with pytest.raises(ConfigurationError, match="contradict"):
        choose(num_blocks=7, kv_cache_memory=MIB)
    with pytest.raises(ConfigurationError, match=r"200 KV blocks need 201.0 MiB, 100.0 MiB are"):
        choose(num_blocks=200)
    with pytest.raises(ConfigurationError, match="lower"):
        choose(kv_cache_memory=2**40)


def test_no_room_for_a_single_block_is_refused():
    with pytest.raises(CacheTooSmall, match="holds no block"):
        choose(kv_cache_memory=1)
    with pytest.raises(CacheTooSmall, match=r"a block takes 1.0 MiB"):
        choose(memory_fraction=0.1)


def test_host_blocks_are_what_the_memory_given_holds():
    assert choose_num_host_blocks(0, shares(), num_blocks=10) == 0
    assert choose_num_host_blocks(7 * MIB + 5, shares(), num_blocks=10) == 7
    assert choose_num_host_blocks(89 * MIB, shares(), num_blocks=10) == 89


def test_host_memory_that_is_not_there_beside_the_cache_or_too_little_is_refused():
    with pytest.raises(ConfigurationError, match=r"is 90.0 MiB, 89.0 MiB are free beside"):
        choose_num_host_blocks(90 * MIB, shares(), num_blocks=10)
    with pytest.raises(CacheTooSmall, match=r"holds no block: a block takes 1.0 MiB"):
        choose_num_host_blocks(5, shares(), num_blocks=10)


def two_pools(**changes):
    """Of keys of 1 KiB and states of 16 KiB a block."""
    return shares((KEYS, STATES), (1024, 16384), **changes)


def test_pools_share_memory_by_what_a_request_takes_of_each():
    """A request of 2048 tokens has 512 blocks of keys, and holds 2 states while it decodes; as many
    bytes are for checkpoints as for keys."""
    pools = two_pools(max_model_len=10_000, max_num_seqs=1000)
    keys, states = choose(kv_cache_memory=16 * MIB, pools=pools)
    assert keys * 1024 + states * 16384 <= 16 * MIB
    assert states == keys * 2 // 512 + keys // 16
    assert (keys + 16) * 1024 + (states + 1) * 16384 > 16 * MIB
    assert choose_num_host_blocks(16 * MIB, pools, num_blocks=(9, 9)) == (keys, states)


def test_every_pool_holds_the_request_that_the_first_one_holds():
    window = KVCacheGroupSpec(1000, pool=1)
    pools = shares((KEYS, window), (1024, 1024), max_model_len=4000, watermark=0.1)
    sizes = choose(num_blocks=500, pools=pools)
    assert sizes[0] == 500
    fit = {"watermark": 0.1, "max_model_len": 4000, "is_asked_for": False}
    assert fit_max_model_len(pools.request, num_blocks=sizes, **fit) == 450 * 4


def test_no_pool_is_larger_than_its_requests_can_use():
    pools = two_pools(max_model_len=400, max_num_seqs=2)
    assert choose(memory_fraction=1.0, pools=pools) == (300, 300 * 2 // 100 + 300 // 16)


def test_the_pool_that_is_too_small_is_named():
    request = two_pools().request
    fit = {"watermark": 0.0, "max_model_len": 40, "is_asked_for": True}
    assert fit_max_model_len(request, num_blocks=(10, 4), **fit) == 40
    with pytest.raises(CacheTooSmall, match="3 KV blocks of pool 1 hold a request of 12 tokens"):
        fit_max_model_len(request, num_blocks=(10, 3), **fit)
    with pytest.raises(CacheTooSmall, match="a block in each of 2 pools takes"):
        choose(kv_cache_memory=1024, pools=two_pools())


def test_checkpoints_take_no_more_bytes_than_keys_and_values():
    assert checkpoint_interval(None, two_pools()) == 16 * 4
    assert checkpoint_interval(None, shares((KEYS, KEYS, STATES), (1000, 3999))) == 2 * 4
    assert checkpoint_interval(24, two_pools()) == 24
    assert checkpoint_interval(None, shares()) == 0


@given(
    num_bytes=st.integers(40_000, 4_000_000),
    max_model_len=st.integers(2, 5000),
    watermark=st.sampled_from([0.0, 0.01, 0.3]),
    window=st.integers(2, 200),
)
def test_no_more_memory_is_shared_than_there_is(num_bytes, max_model_len, watermark, window):
    groups = KEYS, KVCacheGroupSpec(window, pool=2), STATES
    pools = shares(groups, (256, 4096, 640), max_model_len=max_model_len, watermark=watermark)
    sizes = pools.within(num_bytes)
    assert pools.num_bytes(sizes) <= num_bytes < pools.num_bytes(pools.beside(sizes[0] + 1))
    usable = sizes[0] - int(watermark * sizes[0])
    fit = {"watermark": watermark, "max_model_len": max_model_len, "is_asked_for": False}
    length = fit_max_model_len(pools.request, num_blocks=tuple(sizes), **fit)
    assert length == min(max_model_len, 4 * usable)
