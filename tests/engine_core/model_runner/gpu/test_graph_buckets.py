"""Which buckets there are, and which one a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.gpu.step_buckets import StepBucket, StepBuckets, bucket_sizes


def test_the_buckets_of_256_sequences_are_thirteen():
    expected = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert bucket_sizes(256) == expected


@pytest.mark.parametrize(
    ("max_num_seqs", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (3, (1, 2, 3)),
        (24, (1, 2, 4, 8, 16, 24)),
        (25, (1, 2, 4, 8, 16, 24, 25)),
    ],
)
def test_the_largest_bucket_is_exactly_the_most_sequences(max_num_seqs, expected):
    assert bucket_sizes(max_num_seqs) == expected


@given(st.integers(1, 5000), st.data())
def test_decodes_take_the_smallest_bucket_that_holds_them_and_waste_little(max_num_seqs, data):
    buckets = StepBuckets.up_to(max_num_seqs, 8192)
    assert list(buckets.decodes) == sorted(set(buckets.decodes))
    number = data.draw(st.integers(1, max_num_seqs))
    chosen = buckets.choose(number, number)
    assert chosen == min(each for each in buckets.decodes if each.num_sequences >= number)
    assert (chosen.num_tokens - number) * 2 < chosen.num_tokens
    if number > 16:
        assert (chosen.num_tokens - number) * 3 < chosen.num_tokens


@given(st.integers(1, 300), st.integers(1, 3000), st.data())
def test_mixed_steps_take_the_fewest_tokens_then_sequences(max_num_seqs, max_num_tokens, data):
    buckets = StepBuckets.up_to(min(max_num_seqs, max_num_tokens), max_num_tokens)
    assert list(buckets.mixed) == sorted(set(buckets.mixed))
    assert all(
        each.num_tokens > each.num_sequences and each.num_tokens <= 1024 for each in buckets.mixed
    )
    assert all(each.num_sequences <= max_num_seqs for each in buckets.mixed)
    number = data.draw(st.integers(1, max_num_seqs))
    num_tokens = data.draw(st.integers(number + 1, number + 2000))
    chosen = buckets.choose(number, num_tokens)
    if num_tokens > min(max_num_tokens, 1024):
        assert chosen is None
    elif number <= min(max_num_seqs, max_num_tokens):
        fitting = [
            each
            for each in buckets.mixed
            if each.num_tokens >= num_tokens and each.num_sequences >= number
        ]
        assert chosen == min(fitting)
        assert num_tokens <= 16 or (chosen.num_tokens - num_tokens) * 3 < chosen.num_tokens


def test_more_than_the_largest_have_no_bucket():
    assert StepBuckets.up_to(8, 64).choose(9, 9) is None
    assert StepBuckets.up_to(8, 64).choose(3, 65) is None
    assert StepBuckets().choose(1, 1) is None
    assert StepBuckets.up_to(8, 64).choose(3, 20) == StepBucket(24, 8)


def test_fewer_than_one_sequence_is_refused():
    with pytest.raises(ValueError, match="most is 0"):
        bucket_sizes(0)
