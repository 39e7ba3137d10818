"""A GPU's share for the KV cache, from a fake GPU whose memory is numbers."""

import pytest
from fake_gpu import FakeGpu

from engine_core.errors import CacheTooSmall, ConfigurationError
from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.startup.memory import (
    DeviceMemory,
    PoolShares,
    RequestBlocks,
    choose_num_blocks,
    measure_extra_bytes,
    read_device_memory,
)

GIB = 1024**3
MIB = 1024**2


def test_a_step_takes_its_peak_and_what_its_kernels_leave_behind():
    """Proves S194."""
    gpu = FakeGpu()

    def run():
        gpu.take(3 * GIB)
        gpu.drop(3 * GIB)
        gpu.take(1 * GIB)  # in the hole
        gpu.others += 100 * MIB

    assert measure_extra_bytes(run, gpu, expected_bytes=0) == 3 * GIB + 100 * MIB


def test_what_is_expected_is_not_counted_nor_what_others_give_back():
    gpu = FakeGpu()

    def run():
        gpu.take(600 * MIB)
        gpu.others -= 1 * GIB

    assert measure_extra_bytes(run, gpu, expected_bytes=100 * MIB) == 500 * MIB
    assert measure_extra_bytes(lambda: None, gpu, expected_bytes=100 * MIB) == 0


def test_memory_is_read_without_the_holes_that_loading_left():
    memory = read_device_memory(FakeGpu())
    # 10 GiB less 3.5 of weights and 1 of others; the margin is the least one
    assert memory.margin_bytes == 256 * MIB
    assert memory.limit_bytes(step_bytes=GIB) == int((10 - 4.5 - 1 - 0.25) * GIB)


def test_the_fraction_is_of_all_memory_and_bounds_everything_together():
    memory = DeviceMemory(total_bytes=100 * GIB, free_bytes=80 * GIB)
    assert memory.margin_bytes == GIB
    assert memory.share_bytes(0.9, 5 * GIB) == (90 - 20 - 5 - 1) * GIB
    assert memory.share_bytes(0.1, 5 * GIB) < 0


def choose(*, step_bytes=2 * GIB, block_bytes=MIB, **wish):
    wish = {"num_blocks": None, "kv_cache_memory": None, "memory_fraction": 0.9} | wish
    return choose_num_blocks(
        DeviceMemory(total_bytes=24 * GIB, free_bytes=8 * GIB),
        PoolShares(
            pool_bytes=[block_bytes],
            request=RequestBlocks([KVCacheGroupSpec()], 16, 16),
            max_model_len=16_000,
            max_num_seqs=256,
            watermark=0.0,
        ),
        step_bytes=step_bytes,
        **wish,
    )


def test_what_is_chosen_leaves_the_step_and_the_margin():
    margin = DeviceMemory(total_bytes=24 * GIB, free_bytes=0).margin_bytes
    room = int(24 * GIB * 0.9) - 16 * GIB - 2 * GIB - margin
    assert choose() == room // MIB
    assert choose(block_bytes=MIB // 2) == room // (MIB // 2)


def test_a_wish_that_leaves_no_room_for_the_step_is_refused():
    assert choose(num_blocks=5000) == 5000
    with pytest.raises(ConfigurationError, match=r"7168 KV blocks need .*; lower --num-blocks"):
        choose(num_blocks=7168)
    with pytest.raises(
        ConfigurationError, match=r"are free beside 2,048\.0 MiB for .*; lower --num-blocks"
    ):
        choose(kv_cache_memory=8 * GIB)


def test_a_gpu_that_is_full_after_the_weights_says_what_to_do():
    with pytest.raises(CacheTooSmall, match=r"holds no block: .*--memory-fraction, or free"):
        choose(memory_fraction=0.5)
    with pytest.raises(CacheTooSmall, match=r"0\.0 MiB are free"):
        choose(step_bytes=9 * GIB)
