"""The comparison of engines: what is asked, and what figures come of the answers."""

import pytest

from frontend.load.records import RequestRecord
from frontend.load.requests import PlannedRequest
from scripts.comparison.figures import Incomplete, figures_of, medians, ratios
from scripts.comparison.workloads import (
    Workload,
    digest,
    make_rounds,
    make_warm_up,
)

TEXT = range(50_000)
ALL = ("W1", "W2", "W3@2", "W4", "prefill", "prefill@8000")
SINGLE = Workload("W2", (PlannedRequest(0, [1, 2, 3], 8),))


# ------------------------------------------------------------------ workloads


def test_the_same_text_gives_the_same_workloads():
    one, same = (make_rounds(TEXT, ALL, num_rounds=2) for _ in range(2))
    assert one == same and digest(one) == digest(same) != digest(one[:1])


def test_the_workloads_are_as_the_targets_define_them():
    batch, single, arriving, sharing, *prefills = make_rounds(TEXT, ALL, num_rounds=1)[0]
    lengths = [len(one.prompt) for one in batch.requests]
    assert len(lengths) == 64 and 32 <= min(lengths) < 64 and 256 < max(lengths) <= 512
    assert {(one.arrival_s, one.num_output_tokens) for one in batch.requests} == {(0.0, 64)}
    [one] = single.requests
    assert (len(one.prompt), one.num_output_tokens) == (64, 128)
    arrivals = [one.arrival_s for one in arriving.requests]
    assert len(arrivals) == 48 and arrivals == sorted(arrivals) and arrivals[0] > 0
    assert 12 < arrivals[-1] < 48  # two a second
    prefixes = {tuple(one.prompt[:384]) for one in sharing.requests}
    owns = {tuple(one.prompt[384:]) for one in sharing.requests}
    assert (len(prefixes), len(owns), {len(own) for own in owns}) == (1, 32, {32})
    ones = [one for prefill in prefills for one in prefill.requests]
    assert [(len(one.prompt), one.num_output_tokens) for one in ones] == [(2000, 1), (8000, 1)]


def test_rounds_have_the_same_lengths_and_no_beginning_in_common():
    rounds = [*make_rounds(range(30_000), ALL, num_rounds=3), make_warm_up(range(30_000))]
    shape = [
        [[(one.arrival_s, len(one.prompt)) for one in w.requests] for w in round_]
        for round_ in rounds[:3]
    ]
    assert shape[0] == shape[1] == shape[2]
    beginnings = [
        tuple(workload.requests[at].prompt[:16])
        for round_ in rounds
        for workload in round_
        for at in range(1 if workload.name == "W4" else len(workload.requests))
    ]
    assert len(set(beginnings)) == len(beginnings)


@pytest.mark.parametrize("name", ["W5", "W3", "W3@0", "W3@x", "W1@2", ""])
def test_an_unknown_workload_is_refused_by_name(name):
    with pytest.raises(ValueError, match="W3@"):
        make_rounds(TEXT, [name], num_rounds=1)


# ------------------------------------------------------------------ figures


def _record(index, first_s, gaps_s, due_s=0.0):
    last_s = first_s + sum(gaps_s)
    return RequestRecord(index, due_s, due_s, first_s, last_s, last_s, 2, 0, 5, list(gaps_s))


def test_figures_are_those_of_records_worked_out_by_hand():
    workload = Workload("W1", tuple(PlannedRequest(at, [1, 2], 5, 0.5 * at) for at in range(2)))
    records = [_record(0, 1.0, [0.1, 0.1, 0.1, 0.7]), _record(1, 2.5, [0.2] * 4, due_s=0.5)]
    figures = figures_of(workload, records)
    assert figures["duration_s"] == pytest.approx(3.3)
    assert figures["output_tok_s"] == pytest.approx(10 / 3.3)
    assert figures["total_tok_s"] == pytest.approx(14 / 3.3)
    assert figures["ttft_p50_ms"] == pytest.approx(1500)
    assert figures["ttft_p99_ms"] == pytest.approx(1990)
    assert figures["itl_p50_ms"] == pytest.approx(200)
    # eight gaps: 0.93 of the way from the seventh (0.2) to the eighth (0.7)
    assert figures["itl_p99_ms"] == pytest.approx(200 + 0.93 * 500)
    assert "decode_tok_s" not in figures and "prefill_tok_s" not in figures


def test_a_single_request_has_a_decode_and_a_prefill_rate():
    workload = Workload("W2", (PlannedRequest(0, [1] * 10, 5),))
    figures = figures_of(workload, [_record(0, 0.5, [0.1] * 4)])
    assert figures["decode_tok_s"] == pytest.approx(10)
    assert figures["prefill_tok_s"] == pytest.approx(20)


def test_what_was_not_timed_is_absent_and_what_is_short_has_no_figures():
    untimed = RequestRecord(0, 0.0, 0.0, finished_s=2.0, num_output_tokens=8)
    assert set(figures_of(SINGLE, [untimed])) == {"duration_s", "output_tok_s", "total_tok_s"}
    untimed.num_output_tokens = 7
    with pytest.raises(Incomplete, match="7 tokens came, not 8"):
        figures_of(SINGLE, [untimed])
    with pytest.raises(Incomplete, match="0 records of 1"):
        figures_of(SINGLE, [])


def test_ratios_are_of_rounds_that_both_served_and_above_one_where_we_are_better():
    ours = [{"output_tok_s": 20.0, "ttft_p50_ms": 50.0}, None, {"output_tok_s": 90.0}]
    theirs = [{"output_tok_s": 10.0, "ttft_p50_ms": 100.0}, {"output_tok_s": 1.0}] * 2
    assert ratios(ours, theirs[:3]) == {"output_tok_s": pytest.approx(5.5), "ttft_p50_ms": 2.0}
    assert medians([{"a": 1.0}, {"a": 5.0, "b": 2.0}, {"a": 3.0}]) == {"a": 3.0, "b": 2.0}
