"""Checks, timings and figures of the GPU suite, with a fake clock and fake work; needs no GPU."""

import math

import pytest
from fake_checks import Clock, FakeTimer, fails, timed, work

from scripts.gpu.frame import Check, Figure, Group, Timing, exit_code, run_checks, run_figures
from scripts.gpu.report import as_table


def checked(*checks, clock=None, deadline_s=100.0):
    rows = []
    run_checks(checks, clock=clock or Clock(), deadline_s=deadline_s, emit=rows.append)
    return rows


def test_a_check_passes_up_to_its_tolerance_and_nan_never_does():
    errors = {"below": 0.01, "at": 0.02, "above": 0.0201, "nan": math.nan, "infinite": math.inf}
    rows = checked(*(Check(name, lambda e=e: e, 0.02) for name, e in errors.items()))
    assert [row["state"] for row in rows] == ["passed", "passed", "failed", "failed", "failed"]
    assert rows[2]["error"] == 0.0201


def test_a_check_that_raises_is_named_and_the_next_one_runs():
    first, second = checked(Check("a", fails, 0), Check("b", lambda: 0, 0))
    assert first["state"] == "error"
    assert first["why"].startswith("ValueError: shape is wrong; give another (fake_checks.py:")
    assert second["state"] == "passed"


def test_nothing_starts_after_the_deadline():
    clock = Clock()
    checks = [Check(name, clock.takes(6, 0.0), 0) for name in "abc"]
    rows = checked(*checks, clock=clock, deadline_s=10)
    assert [row["state"] for row in rows] == ["passed", "passed", "not run"]
    assert rows[0]["seconds"] == 6
    timer = FakeTimer()
    (row,) = timed(
        Timing("t", "a", work), states={"a": "passed"}, timer=timer, clock=clock, deadline_s=10
    )
    assert (row["state"], timer.calls) == ("not run", 0)


@pytest.mark.parametrize("state", ["failed", "error", "not run", None])
def test_what_did_not_pass_its_check_is_not_timed(state):
    timer = FakeTimer()
    (row,) = timed(Timing("t", "a", work), states={"a": state} if state else {}, timer=timer)
    assert (row["state"], timer.calls) == ("refused", 0)


def test_a_figure_says_how_far_it_is_from_the_floor():
    bound_by_bytes, bound_by_flops = timed(
        Timing("bytes", "a", work),
        Timing("flops", "a", lambda: work(num_flops=1.2e9)),
        states={"a": "passed"},
    )
    assert bound_by_bytes["floor_us"] == 1.0
    assert bound_by_bytes["of_floor"] == 0.5
    assert bound_by_bytes["gigabytes_s"] == 2000
    assert "teraflop_s" not in bound_by_bytes
    assert (bound_by_flops["floor_us"], bound_by_flops["teraflop_s"]) == (1.5, 600)


def test_a_timing_whose_inputs_cannot_be_made_is_an_error():
    rows = timed(Timing("t", "a", fails), Timing("u", "a", work), states={"a": "passed"})
    assert [row["state"] for row in rows] == ["error", "timed"]


def test_what_cannot_be_recorded_in_a_graph_is_timed_without_one():
    (row,) = timed(Timing("t", "a", lambda: work(fits_graph=False)), states={"a": "passed"})
    assert (row["state"], row["graph_us"]) == ("timed", None)


def figured(*figures, states, clock=None, deadline_s=100.0):
    rows = []
    run_figures(
        figures, states=states, clock=clock or Clock(), deadline_s=deadline_s, emit=rows.append
    )
    return rows


def test_figures_are_measured_under_the_same_rules():
    clock = Clock()
    figure = Figure("f", "a", clock.takes(6, {"tok_s": 7}))
    broken = Figure("g", "a", fails)
    rows = figured(
        figure, broken, figure, figure, states={"a": "passed"}, clock=clock, deadline_s=9
    )
    assert [row["state"] for row in rows] == ["measured", "error", "measured", "not run"]
    assert (rows[0]["figures"], rows[0]["seconds"]) == ({"tok_s": 7}, 6)
    (row,) = figured(figure, states={"a": "failed"})
    assert (row["state"], clock.now_s) == ("refused", 12)
    assert exit_code(rows[:1]) == 0
    assert "f: tok_s 7" in as_table({"ceilings": None, "rows": [{"group": "g"} | rows[0]]})


def test_a_group_with_a_loose_end_is_refused():
    with pytest.raises(ValueError, match="bound to the check 'b', which group g does not have"):
        Group("g", (Check("a", fails, 0),), (Timing("t", "b", work),)).validate()
    with pytest.raises(ValueError, match="bound to the check 'b'"):
        Group("g", (Check("a", fails, 0),), figures=(Figure("f", "b", dict),)).validate()
    with pytest.raises(ValueError, match="'a' twice"):
        Group("g", (Check("a", fails, 0), Check("a", fails, 0))).validate()


def test_selecting_a_timing_selects_its_check():
    checks = tuple(Check(name, fails, 0) for name in ("norm small", "norm large", "rope"))
    group = Group("g", checks, (Timing("speed of norm", "norm large", work),))
    assert group.select("speed").checks == (checks[1],)
    assert group.select("rope").timings == ()
    figures = Group("g", checks, figures=(Figure("whole", "rope", dict),)).select("whole")
    assert (figures.checks, len(figures.figures)) == ((checks[2],), 1)
    assert group.select("g") == group.select("") == group


def test_the_exit_code_is_0_only_if_everything_ran_and_passed():
    assert exit_code([{"state": "passed"}, {"state": "timed"}, {"state": "not there"}]) == 0
    for state in ("failed", "error", "refused", "not run"):
        assert exit_code([{"state": "passed"}, {"state": state}]) == 1
