"""The longest request that a cache holds: the length that clients are sent can be admitted."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.errors import CacheTooSmall
from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.startup.memory import RequestBlocks, fit_max_model_len

FULL = KVCacheGroupSpec()


def need(groups=(FULL,), max_chunk_size=8, block_size=4):
    return RequestBlocks(groups, max_chunk_size, block_size)


def fit(num_blocks, max_model_len, *, watermark=0.0, is_asked_for=False, **changes):
    return fit_max_model_len(
        need(**changes),
        num_blocks=num_blocks,
        watermark=watermark,
        max_model_len=max_model_len,
        is_asked_for=is_asked_for,
    )


def test_a_length_that_fits_is_kept():
    assert fit(10, 40) == 40


def test_the_models_own_limit_gives_way_to_the_cache_and_the_log_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        assert fit(10, 41) == 40
    assert "max_model_len is 40, not the model's 41" in caplog.text


def test_the_watermark_is_left_free():
    """Proves S133: the largest admissible request leaves the head-room free."""
    assert fit(100, 1000, watermark=0.05) == 95 * 4
    assert fit(100, 1000, watermark=0.009) == 100 * 4
    with pytest.raises(CacheTooSmall, match="5 of which --watermark keeps free, hold a request"):
        fit(100, 400, watermark=0.05, is_asked_for=True)
    assert fit(100, 380, watermark=0.05, is_asked_for=True) == 380


def test_a_limit_that_was_asked_for_does_not_give_way():
    with pytest.raises(CacheTooSmall, match="hold a request of 40 tokens, --max-model-len is 41"):
        fit(10, 41, is_asked_for=True)


def test_a_cache_for_no_answer_at_all_is_refused():
    with pytest.raises(CacheTooSmall, match="do not hold a prompt token and an answer"):
        fit(1, 40, groups=(FULL, FULL))


@given(
    num_blocks=st.integers(2, 60),
    watermark=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    window=st.none() | st.integers(1, 40),
    chunk=st.integers(1, 20),
)
def test_the_length_found_is_the_longest_that_leaves_the_watermark(
    num_blocks, watermark, window, chunk
):
    groups = (FULL, KVCacheGroupSpec(window)) if window else (FULL,)
    usable = num_blocks - int(watermark * num_blocks)
    wanted = need(groups, chunk)
    try:
        length = fit(num_blocks, 300, watermark=watermark, groups=groups, max_chunk_size=chunk)
    except CacheTooSmall:
        assert sum(wanted.num_blocks(2)) > usable
        return
    assert sum(wanted.num_blocks(length)) <= usable
    assert length == 300 or sum(wanted.num_blocks(length + 1)) > usable
