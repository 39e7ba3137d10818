"""The number of KV blocks: asked for, given as memory, or from what is free."""

import pytest

from engine_core.errors import CacheTooSmall, ConfigurationError
from engine_core.startup import memory
from engine_core.startup.memory import HostMemory, choose_num_blocks, choose_num_host_blocks

MIB = 1024**2


@pytest.fixture(autouse=True)
def hundred_megabytes(monkeypatch):
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 100 * MIB)


def choose(num_blocks=None, kv_cache_memory=None, memory_fraction=0.5):
    return choose_num_blocks(
        HostMemory(),
        block_bytes=MIB,
        blocks_per_request=10,
        max_num_seqs=4,
        step_bytes=20 * MIB,
        num_blocks=num_blocks,
        kv_cache_memory=kv_cache_memory,
        memory_fraction=memory_fraction,
    )


def test_free_memory_less_a_steps_activations_is_used():
    assert choose() == 30


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
    assert choose_num_host_blocks(0, block_bytes=MIB, num_blocks=10) == 0
    assert choose_num_host_blocks(7 * MIB + 5, block_bytes=MIB, num_blocks=10) == 7
    assert choose_num_host_blocks(89 * MIB, block_bytes=MIB, num_blocks=10) == 89


def test_host_memory_that_is_not_there_beside_the_cache_or_too_little_is_refused():
    with pytest.raises(ConfigurationError, match=r"is 90.0 MiB, 89.0 MiB are free beside"):
        choose_num_host_blocks(90 * MIB, block_bytes=MIB, num_blocks=10)
    with pytest.raises(CacheTooSmall, match=r"holds no block: a block takes 1.0 MiB"):
        choose_num_host_blocks(5, block_bytes=MIB, num_blocks=10)
