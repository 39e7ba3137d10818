"""Hashes that a request brings along are those that the cache would make."""

import pytest
from simulation_parts import request

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import Request
from protocol.sampling import SamplingParams
from scripts.simulator.shared_text import shared_block_hashes
from scripts.simulator.trace import shared_segment


@pytest.mark.parametrize("num_shared", [0, 1, 15, 16, 17, 64, 70])
@pytest.mark.parametrize("num_own", [1, 16, 33])
def test_they_are_the_first_of_the_hashes_that_the_cache_makes(num_shared, num_own):
    context = (shared_segment(7, num_shared), shared_segment(8, 40)) if num_shared else ()
    traced = request(3, 0.0, num_own, 1, context=context)
    asked = Request(
        request_id="a",
        prompt_token_ids=traced.prompt(),
        sampling_params=SamplingParams(max_tokens=1),
    )
    KVCacheManager(num_blocks=50, block_size=16).find_cached_prefix(asked.sequences[0])

    known = shared_block_hashes(traced, 16)

    assert len(known) == num_shared // 16
    assert list(known) == asked.block_hashes[: len(known)]


def test_a_prompt_that_begins_with_text_of_its_own_brings_none():
    later = request(3, 0.0, 5, 1, context=((6, 64), shared_segment(7, 64)))
    assert shared_block_hashes(later, 16) == ()
