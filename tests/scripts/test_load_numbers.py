"""The load test's arithmetic: schedules, lengths, percentiles, summaries."""

import itertools
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.load.arrivals import first_arrivals, poisson
from scripts.load.clients import share_of
from scripts.load.records import RequestRecord, distribution, summarise
from scripts.load.report import as_table
from scripts.load.workload import LengthRange, RequestGenerator

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=50)


@given(values=VALUES)
def test_percentiles_are_linear_between_neighbours(values):
    found = distribution(values)
    for percent in (50, 90, 95, 99):
        expected = np.percentile(values, percent)
        assert found[f"p{percent}"] == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert (found["count"], found["max"]) == (len(values), max(values))


def test_percentiles_of_one_value_are_the_value_and_of_none_there_are_none():
    assert {distribution([3.0])[name] for name in ("mean", "p50", "p99", "max")} == {3.0}
    assert distribution([]) is None


def arrivals(rate, *, seed=3, **end):
    return first_arrivals(poisson(rate, np.random.default_rng(seed)), **end)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_a_poisson_process():
    times = arrivals(5.0, num_requests=20_000)
    gaps = np.diff([0.0, *times])
    assert list(times) == sorted(times)
    # gaps of a Poisson process are exponential: mean and deviation are both 1 / rate
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_schedule_is_a_function_of_the_seed_and_ends_as_asked():
    assert arrivals(2, num_requests=9) == arrivals(2, num_requests=9)
    assert arrivals(2, num_requests=9) != arrivals(2, seed=4, num_requests=9)
    within = arrivals(50, duration_s=2.0)
    assert within[-1] < 2.0
    assert arrivals(50, num_requests=len(within)) == within
    assert len(arrivals(50, num_requests=5, duration_s=2.0)) == 5


def test_schedule_without_end_or_rate_is_refused():
    with pytest.raises(ValueError, match="no end"):
        arrivals(1.0)
    for rate in (0, -1, math.inf, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            arrivals(rate, num_requests=1)


@given(total=st.integers(0, 100), num_parts=st.integers(1, 9))
def test_shares_add_up_and_differ_by_one_at_most(total, num_parts):
    shares = [share_of(total, part=part, num_parts=num_parts) for part in range(num_parts)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


def test_lengths_are_within_their_range_and_log_uniform_prefers_short_ones():
    def lengths(how):
        generator = make_generator(prompt_len=LengthRange.parse("8:512", distribution=how))
        return [len(generator.request(index).prompt_token_ids) for index in range(2000)]

    log_uniform, uniform = lengths("log-uniform"), lengths("uniform")
    for each in (log_uniform, uniform):
        assert min(each) >= 8
        assert max(each) <= 512
    # the median of a log-uniform range is its geometric middle
    assert statistics.median(log_uniform) == pytest.approx(64, rel=0.15)
    assert statistics.median(uniform) == pytest.approx(260, rel=0.15)


def test_fixed_length_is_a_range_of_one():
    assert LengthRange.parse("64") == LengthRange(64, 64)


@pytest.mark.parametrize("text", ["", "0", "a", "3:", "5:4", "1:2:3", "-3", "1.5"])
def test_wrong_lengths_are_refused(text):
    with pytest.raises(ValueError, match="write"):
        LengthRange.parse(text)


def make_generator(**options):
    return RequestGenerator(
        **{
            "seed": 1,
            "prompt_len": LengthRange(4, 4),
            "output_len": LengthRange(2, 2),
            "shared_prefix_len": 0,
            "allowed_token_ids": range(5, 100),
            **options,
        }
    )


def test_requests_are_functions_of_seed_and_index_and_share_their_prefix():
    generator = make_generator(shared_prefix_len=3)
    first, second = generator.request(0), generator.request(1)
    assert generator.request(0) == first
    assert first.prompt_token_ids[:3] == second.prompt_token_ids[:3]
    assert first.prompt_token_ids[3:] != second.prompt_token_ids[3:]
    assert len(first.prompt_token_ids) == 7
    assert generator.longest_request == 9
    assert make_generator(seed=2).request(0) != make_generator().request(0)
    assert set(first.prompt_token_ids) <= set(range(5, 100))


def test_prompts_from_a_text_are_windows_of_it_that_wrap_around():
    text = list(range(1000, 1006))
    prompt = make_generator(prompt_len=LengthRange(15, 15), text_token_ids=text).request(0)
    token_ids = prompt.prompt_token_ids
    assert len(token_ids) == 15
    assert all((later - earlier) % 6 == 1 for earlier, later in itertools.pairwise(token_ids))


def test_latency_counts_from_the_scheduled_arrival_not_from_the_sending():
    late = RequestRecord(0, due_s=1.0, sent_s=3.0, first_token_s=3.5, last_token_s=4.5)
    late.finished_s, late.num_output_tokens, late.num_prompt_tokens = 5.0, 3, 10
    late.gaps_s = [0.4, 0.6]
    summary = summarise([late])
    assert summary["ttft_s"]["p50"] == 2.5
    assert summary["end_to_end_s"]["max"] == 4.0
    assert summary["client_lateness_s"]["max"] == 2.0
    assert summary["tpot_s"]["mean"] == 0.5
    assert summary["inter_token_s"]["count"] == 2
    assert summary["duration_s"] == 4.0
    assert summary["throughput"]["output_tokens_per_s"] == 0.75
    assert summary["throughput"]["prompt_tokens_per_s"] == 2.5


def test_failed_requests_are_counted_by_kind_and_left_out_of_latencies():
    done = RequestRecord(0, 0.0, 0.0, 1.0, 1.0, 1.0, num_output_tokens=1)
    failed = [RequestRecord(i, 0.0, 0.0, finished_s=9.0, error="EngineDied") for i in (1, 2)]
    summary = summarise([done, *failed])
    assert summary["errors"] == {"EngineDied": 2}
    assert (summary["num_requests"], summary["num_finished"]) == (3, 1)
    assert summary["end_to_end_s"]["max"] == 1.0
    assert summary["tpot_s"] is None
    table = as_table(summary)
    assert "1 of 3 requests finished" in table
    assert "failed, EngineDied: 2" in table


def test_summary_of_nothing_is_no_division_by_zero():
    summary = summarise([])
    assert summary["throughput"]["requests_per_s"] == 0.0
    assert "0 of 0" in as_table(summary)
