"""Copies between blocks, against a plain loop over the pairs."""

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache import CacheCopies
from engine_core.model_runner.cache import BlockStorage, origin_of_each
from kernels.torch.operations import TorchOperations

NUM_BLOCKS, NUM_HOST_BLOCKS = 6, 4
device_ids = st.integers(1, NUM_BLOCKS)
host_ids = st.integers(NUM_BLOCKS + 1, NUM_BLOCKS + NUM_HOST_BLOCKS)


def pairs(sources, destinations):
    return st.lists(st.tuples(sources, destinations), max_size=8)


def make_storage(num_host_blocks=NUM_HOST_BLOCKS):
    return BlockStorage(
        SimpleNamespace(
            ops=TorchOperations(),
            num_blocks=NUM_BLOCKS,
            num_host_blocks=num_host_blocks,
            block_bytes=64,
        )
    )


@given(pairs(host_ids, device_ids), pairs(device_ids, host_ids), pairs(device_ids, device_ids))
def test_lists_are_carried_out_in_order_and_pairs_from_first_to_last(swap_in, swap_out, copy):
    """Proves S130, S196."""
    storage = make_storage()
    memory = list(range(NUM_BLOCKS + NUM_HOST_BLOCKS + 1))
    storage.device_blocks.copy_(torch.tensor(memory)[: NUM_BLOCKS + 1, None])
    storage.host_blocks.copy_(torch.tensor(memory)[NUM_BLOCKS + 1 :, None])
    for source, destination in [*swap_in, *swap_out, *copy]:
        memory[destination] = memory[source]
    storage.carry_out(CacheCopies(swap_in=swap_in, swap_out=swap_out, copy=copy))
    blocks = torch.cat([storage.device_blocks, storage.host_blocks])
    assert (blocks == torch.tensor(memory)[:, None]).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12))
def test_all_pairs_at_once_leave_what_one_after_another_leaves(copies):
    memory = list(range(6))
    for source, destination in copies:
        memory[destination] = memory[source]
    at_once = list(range(6))
    for destination, origin in origin_of_each(copies).items():
        at_once[destination] = origin
    assert at_once == memory


def test_without_host_blocks_there_is_no_host_memory():
    storage = make_storage(num_host_blocks=0)
    assert not len(storage.host_blocks)
    storage.carry_out(CacheCopies(copy=[(1, 2)]))
    storage.carry_out(CacheCopies())
