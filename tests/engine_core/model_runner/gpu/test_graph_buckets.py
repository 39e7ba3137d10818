"""Which buckets there are, and which one a step takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.gpu.step import choose_bucket, decode_buckets


def test_the_buckets_of_256_sequences_are_thirteen():
    expected = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert decode_buckets(256) == expected


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
    assert decode_buckets(max_num_seqs) == expected


@given(st.integers(1, 5000), st.data())
def test_a_step_takes_the_smallest_bucket_that_holds_it_and_wastes_little(max_num_seqs, data):
    buckets = decode_buckets(max_num_seqs)
    assert list(buckets) == sorted(set(buckets))
    number = data.draw(st.integers(1, max_num_seqs))
    chosen = choose_bucket(buckets, number)
    assert chosen == min(size for size in buckets if size >= number)
    assert (chosen - number) * 2 < chosen
    if number > 16:
        assert (chosen - number) * 3 < chosen


def test_nothing_and_more_than_the_largest_have_no_bucket():
    assert choose_bucket(decode_buckets(8), 0) is None
    assert choose_bucket(decode_buckets(8), 9) is None
    assert choose_bucket((), 1) is None


def test_fewer_than_one_sequence_is_refused():
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        decode_buckets(0)
