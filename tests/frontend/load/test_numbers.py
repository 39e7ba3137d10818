"""The load test's arithmetic: summaries, goodput, comparisons; numpy says what is right."""

import dataclasses
import math
import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from frontend.load.charts import line_chart
from frontend.load.clients import ClientFacts, Outcome, share_of
from frontend.load.comparison import compare, resamples
from frontend.load.options import parse_goodput
from frontend.load.records import (
    RequestRecord,
    distribution,
    running_by_time,
    summarise,
    tokens_by_time,
)
from frontend.load.results import as_table, make_result, read_json, vllm_results, write_json

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(values=VALUES, percents=st.lists(st.floats(0, 100), max_size=4))
def test_distributions_are_those_of_numpy(values, percents):
    found = distribution(values, percents)
    for percent in percents:
        expected = np.percentile(values, percent)
        assert found[f"p{percent:g}"] == pytest.approx(expected, rel=1e-5, abs=1e-3)
    assert found["mean"] == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert found["std"] == pytest.approx(np.std(values), rel=1e-6, abs=1e-5)
    assert (found["count"], found["max"]) == (len(values), max(values))


@given(total=st.integers(0, 100), num_parts=st.integers(1, 9))
def test_shares_add_up_and_differ_by_one_at_most(total, num_parts):
    shares = [share_of(total, part=part, num_parts=num_parts) for part in range(num_parts)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


# ---------------------------------------------------------------------- one run


def request(index=0, *, due=0.0, late=0.0, first=0.1, gaps=(0.1, 0.1), error=None, tokens=None):
    """One output at `first` seconds after it was sent, and one after each gap."""
    sent = due + late
    last = sent + first + sum(gaps)
    record = RequestRecord(index, due, sent, sent + first, last, last + 0.01, 10)
    record.num_output_tokens = len(gaps) + 1 if tokens is None else tokens
    record.gaps_s, record.error = list(gaps), error
    return record


def test_latency_counts_from_the_scheduled_arrival_and_beside_it_from_the_sending():
    summary = summarise([request(due=1.0, late=2.0, first=0.5, gaps=(0.4, 0.6))])
    assert summary["ttft_s"]["p50"] == pytest.approx(2.5)
    assert summary["ttft_from_send_s"]["p50"] == pytest.approx(0.5)
    assert summary["end_to_end_s"]["max"] == pytest.approx(3.51)
    assert summary["end_to_end_from_send_s"]["max"] == pytest.approx(1.51)
    assert summary["client_lateness_s"]["max"] == pytest.approx(2.0)
    assert summary["tpot_s"]["mean"] == pytest.approx(0.5)
    assert summary["inter_token_s"]["count"] == 2
    assert summary["duration_s"] == pytest.approx(3.51)
    assert summary["throughput"]["output_tokens_per_s"] == pytest.approx(3 / 3.51)


def test_failed_requests_are_counted_by_kind_and_left_out_of_latencies():
    failed = [request(at, first=9.0, error="HTTP 500") for at in (1, 2)]
    failed[1].detail = "later"
    failed[0].detail = "out of memory"
    summary = summarise([request(), *failed])
    assert summary["errors"] == {"HTTP 500": 2}
    assert (summary["num_requests"], summary["num_finished"]) == (3, 1)
    assert summary["ttft_s"]["max"] == pytest.approx(0.1)
    table = as_table(summary)
    assert "1 of 3 requests finished" in table
    assert "failed, HTTP 500: 2, for example: out of memory" in table


def test_summary_of_nothing_is_no_division_by_zero():
    summary = summarise([], slos_s={"ttft": 1.0})
    assert summary["ttft_s"] is None
    assert summary["throughput"]["requests_per_s"] == summary["goodput"]["share"] == 0.0
    assert "0 of 0" in as_table(summary)


def test_vllms_names_hold_vllms_figures():
    random = np.random.default_rng(0)
    records = [
        request(at, due=at * 0.1, late=0.05, first=random.exponential(), gaps=random.random(8))
        for at in range(40)
    ]
    found = vllm_results(summarise(records, percentiles=[50, 99, 99.9]))
    # as vllm/benchmarks/serve.py: from the sending, population deviation, linear percentiles
    ttft = np.array([one.first_token_s - one.sent_s for one in records]) * 1000
    tpot = np.array([np.mean(one.gaps_s) for one in records]) * 1000
    itl = np.concatenate([one.gaps_s for one in records]) * 1000
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert found[f"median_{name}_ms"] == pytest.approx(np.median(values))
        assert found[f"std_{name}_ms"] == pytest.approx(np.std(values))
        assert found[f"p99.9_{name}_ms"] == pytest.approx(np.percentile(values, 99.9))
    assert {"mean_e2el_ms", "p99_e2el_ms", "request_goodput"} <= found.keys()
    assert (found["completed"], found["total_output_tokens"]) == (40, 360)
    assert found["total_token_throughput"] == pytest.approx(760 / found["duration"])


def test_the_peak_of_running_requests_counts_no_request_twice():
    records = [request(at, due=start, gaps=()) for at, start in enumerate((0.0, 0.05, 0.3))]
    records[2].sent_s = records[1].finished_s  # as one ends the next is sent
    assert max(num for _, num in running_by_time(records)) == 2
    assert running_by_time(records)[-1] == (records[2].finished_s, 0)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=20), width=st.floats(0.05, 3))
def test_tokens_over_time_are_all_tokens(counts, width):
    records = [request(due=0.3 * at, tokens=count) for at, count in enumerate(counts)]
    assert sum(tokens_by_time(records, 0.0, width)) == pytest.approx(sum(counts))


def test_goodput_is_of_requests_within_all_slos_and_failures_are_not():
    records = [
        request(0, first=0.4, gaps=(0.04,)),
        request(1, first=0.6, gaps=(0.04,)),  # late first token
        request(2, first=0.4, gaps=(0.06,)),  # slow tokens
        request(3, first=0.4, gaps=()),  # one token has no slow ones
        request(4, first=0.4, error="HTTP 500"),
        request(5, late=0.2, first=0.4, gaps=(0.04,)),  # sent late: the wait counts
    ]
    slos_s = parse_goodput(["ttft:500", "tpot:50"])
    assert slos_s == {"ttft": 0.5, "tpot": 0.05}
    summary = summarise(records, slos_s=slos_s)
    assert [one.is_good(slos_s) for one in records] == [True, False, False, True, False, False]
    assert summary["goodput"]["share"] == pytest.approx(2 / 6)
    assert summary["goodput"]["requests_per_s"] == pytest.approx(2 / summary["duration_s"])


@pytest.mark.parametrize("text", ["ttft", "ttft:0", "ttft:x", "speed:5", "ttft:inf", ""])
def test_wrong_slos_are_refused(text):
    with pytest.raises(ValueError, match="KEY:MILLISECONDS"):
        parse_goodput([text])


# ---------------------------------------------------------------------- is the client in the way?


def warnings_of(records, *, cpu=0.1, lag=0.001, is_limited=False):
    outcome = Outcome(records, [ClientFacts(0.0, 0.0, 0.0), ClientFacts(cpu, lag, 1.0)])
    result = make_result(
        "a", outcome, percentiles=[50, 99], slos_s={}, is_limited=is_limited, facts={}
    )
    return " ".join(result.document["warnings"])


def test_a_client_that_is_the_bottleneck_says_so():
    assert warnings_of([request()]) == ""
    assert "94% of a core" in warnings_of([request()], cpu=0.94)
    assert "ran 30 ms late" in warnings_of([request()], lag=0.03)
    assert "sent 200 ms late" in warnings_of([request(late=0.2)])
    assert "--processes" in warnings_of([request(late=0.2)])
    # a wait for --max-concurrency is no lateness of the client
    assert warnings_of([request(late=0.2)], is_limited=True) == ""
    assert "1 of 1 requests failed" in warnings_of([request(error="HTTP 429")])


# ---------------------------------------------------------------------- two runs


def run_of(random, scale=1.0, count=400):
    return [
        request(
            at,
            due=0.1 * at,
            first=scale * random.gamma(4, 0.05),
            gaps=scale * random.gamma(9, 0.003, 10),
        )
        for at in range(count)
    ]


def row(rows, name):
    [found] = [one for one in rows if one["figure"] == name]
    return found


def test_a_run_that_is_slower_by_a_fifth_is_found_to_be():
    random = np.random.default_rng(1)
    rows = compare(run_of(random), run_of(random, 1.2), slos_s={"ttft": 0.2})
    for name in ("TTFT mean, ms", "TPOT p50, ms", "ITL mean, ms", "E2EL p50, ms"):
        found = row(rows, name)
        assert found["verdict"] == "worse"
        assert found["low"] < 1.2 < found["high"]
        assert found["ratio"] == pytest.approx(found["second"] / found["first"])
    assert row(rows, "share within SLOs")["verdict"] == "worse"
    assert row(compare(run_of(random, 1.2), run_of(random)), "TPOT mean, ms")["verdict"] == "better"


def test_intervals_of_equal_runs_hold_one_as_often_as_they_say():
    random = np.random.default_rng(2)
    held = [
        one["low"] <= 1 <= one["high"]
        for _ in range(20)
        for one in compare(run_of(random, count=60), run_of(random, count=60))
        if one["figure"] == "TTFT mean, ms"
    ]
    # 95 % of 20 are 19; fewer than 16 come once in 400 times
    assert len(held) == 20
    assert sum(held) >= 16


def test_an_interval_of_a_mean_is_as_wide_as_theory_says():
    random = np.random.default_rng(3)
    values = random.normal(10, 2, 900)
    means = [values[drawn].mean() for drawn in resamples(900, random)]
    low, high = np.percentile(means, [2.5, 97.5])
    assert high - low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(900), rel=0.1)


def test_blocks_of_neighbours_widen_the_interval_where_neighbours_are_alike():
    random = np.random.default_rng(4)
    queue = np.repeat(random.normal(10, 2, 90), 10)  # ten in a row wait for the same
    wide, narrow = (
        np.std([queue[drawn].mean() for drawn in resamples(900, random, block)])
        for block in (10, 1)
    )
    assert wide > 2 * narrow
    drawn = resamples(900, random, 10)[0]
    assert len(drawn) == 900
    assert set(np.diff(drawn.reshape(90, 10), axis=1).ravel()) <= {1, -899}


def test_a_result_read_back_is_the_one_written(tmp_path):
    records = [request(at, due=0.5 * at) for at in range(3)] + [request(3, error="HTTP 500")]
    outcome = Outcome(records, [ClientFacts(0.1, 0.001, 0.002)])
    options = {"percentiles": [50, 99], "slos_s": {}, "is_limited": False, "facts": {"x": 1}}
    results = [make_result(name, outcome, **options) for name in ("a", "b")]
    for written in (results[:1], results):
        write_json(tmp_path / "r.json", written)
        read = read_json(tmp_path / "r.json")
        assert [one.name for one in read] == [one.name for one in written]
        for one, record in zip(read[0].records, records, strict=True):
            expected, found = dataclasses.asdict(record), dataclasses.asdict(one)
            assert found.pop("gaps_s") == pytest.approx(expected.pop("gaps_s"), abs=1e-6)
            assert found == pytest.approx(expected, abs=1e-6)
    (tmp_path / "r.json").write_text('{"label": "x"}')
    with pytest.raises(ValueError, match=r"write one with --json FILE"):
        read_json(tmp_path / "r.json")


# ---------------------------------------------------------------------- charts

POSITIVE = st.floats(1e-300, 1e300)


@given(values=st.lists(POSITIVE, min_size=1, max_size=4), log=st.booleans())
@example(values=[887.0, 3450.0], log=True)
@example(values=[76.9, 261.0], log=True)
@example(values=[5.0, 5.0], log=True)
@example(values=[0.0], log=True)
@example(values=[0.0], log=False)
def test_an_axis_always_has_numbers_that_differ_and_rise(values, log):
    points = {"run": [(1.0, value) for value in values]}
    svg = line_chart("Title", "x", "y", points, log_y=log)
    found = re.findall(r'y="([0-9.-]+)" text-anchor="end">([^<]+)<', svg)
    numbers = [float(text) for _, text in found]
    assert 2 <= len(numbers) <= 12
    assert numbers == sorted(set(numbers))
    heights = [float(height) for height, _ in found]
    assert all(10 <= height <= 243 for height in heights), "within the picture"
    assert heights == sorted(heights, reverse=True)


@given(low=POSITIVE, factor=st.floats(10, 1000))
def test_a_logarithmic_axis_has_1_2_and_5_of_its_decades(low, factor):
    svg = line_chart("Title", "x", "y", {"run": [(1, low), (2, low * factor)]}, log_y=True)
    numbers = re.findall(r'text-anchor="end">([^<]+)<', svg)
    assert {f"{float(number):e}"[0] for number in numbers} <= {"1", "2", "5"}
