"""The frame of the GPU suite, with a fake clock, fake checks and fake processes; needs no GPU."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.gpu.frame import (
    Ceilings,
    Check,
    Group,
    Timing,
    Work,
    exit_code,
    run_checks,
    run_timings,
)
from scripts.gpu.registry import group_names, load_group
from scripts.gpu.report import as_list, as_table
from scripts.gpu.suite import Suite
from scripts.gpu_suite import main

ROOT = Path(__file__).parents[2]
CEILINGS = Ceilings(copy_bytes_s=4e12, matmul_flop_s=8e14)


class Clock:
    """Seconds that pass only when somebody says so."""

    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s

    def takes(self, seconds, result):
        def run():
            self.now_s += seconds
            return result

        return run


class FakeTimer:
    def __init__(self, median_us=2.0):
        self.median_us, self.calls = median_us, 0

    def measure(self, call):
        self.calls += 1
        call()
        return {"median_us": self.median_us, "again_us": self.median_us, "graph_us": 1.0}


def fails():
    raise ValueError("shape is wrong;\n give another")


def checked(*checks, clock=None, deadline_s=100.0):
    rows = []
    run_checks(checks, clock=clock or Clock(), deadline_s=deadline_s, emit=rows.append)
    return rows


def timed(*timings, states, timer=None, clock=None, deadline_s=100.0):
    rows = []
    run_timings(
        timings,
        states=states,
        ceilings=CEILINGS,
        timer=timer or FakeTimer(),
        clock=clock or Clock(),
        deadline_s=deadline_s,
        emit=rows.append,
    )
    return rows


def work(**changes):
    return Work(**({"call": lambda: None, "num_bytes": 4e6} | changes))


def test_a_check_passes_up_to_its_tolerance_and_nan_never_does():
    errors = {"below": 0.01, "at": 0.02, "above": 0.0201, "nan": math.nan, "infinite": math.inf}
    rows = checked(*(Check(name, lambda e=e: e, 0.02) for name, e in errors.items()))
    assert [row["state"] for row in rows] == ["passed", "passed", "failed", "failed", "failed"]
    assert rows[2]["error"] == 0.0201


def test_a_check_that_raises_is_named_and_the_next_one_runs():
    first, second = checked(Check("a", fails, 0), Check("b", lambda: 0, 0))
    assert first["state"] == "error"
    assert first["why"].startswith("ValueError: shape is wrong; give another (test_gpu_suite.py:")
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


def test_a_group_with_a_loose_end_is_refused():
    with pytest.raises(ValueError, match="bound to the check 'b', which group g does not have"):
        Group("g", (Check("a", fails, 0),), (Timing("t", "b", work),)).validate()
    with pytest.raises(ValueError, match="'a' twice"):
        Group("g", (Check("a", fails, 0), Check("a", fails, 0))).validate()


def test_selecting_a_timing_selects_its_check():
    checks = tuple(Check(name, fails, 0) for name in ("norm small", "norm large", "rope"))
    group = Group("g", checks, (Timing("speed of norm", "norm large", work),))
    assert group.select("speed").checks == (checks[1],)
    assert group.select("rope").timings == ()
    assert group.select("g") == group.select("") == group


def test_the_exit_code_is_0_only_if_everything_ran_and_passed():
    assert exit_code([{"state": "passed"}, {"state": "timed"}, {"state": "not there"}]) == 0
    for state in ("failed", "error", "refused", "not run"):
        assert exit_code([{"state": "passed"}, {"state": state}]) == 1


def make_suite(groups, run, clock=None, time_limit_s=100.0):
    saved = []
    suite = Suite(groups, "", time_limit_s, run, clock or Clock(), lambda d: saved.append(str(d)))
    return suite, saved


MACHINE = {
    "kind": "ceilings",
    "machine": {"device": {"name": "a GPU"}},
    "ceilings": {"copy_bytes_s": 4e12, "matmul_flop_s": 8e14},
}
GROUPS = [
    Group("norm", (Check("n1", fails, 0), Check("n2", fails, 0)), (Timing("nt", "n1", work),)),
    Group("rope", (Check("r1", fails, 0),), (Timing("rt", "r1", work),)),
    Group("later", missing="to come"),
]


def test_phases_come_in_order_and_timings_know_their_checks():
    asked = []

    def run(instruction):
        asked.append(instruction)
        if instruction.phase == "ceilings":
            return [MACHINE], None
        letter = instruction.group[0]
        if instruction.phase == "checks":
            names = [f"{letter}{i}" for i in (1, 2)][: 2 if letter == "n" else 1]
            return [{"kind": "check", "name": n, "state": "passed"} for n in names], None
        return [{"kind": "timing", "name": f"{letter}t", "state": "timed"}], None

    suite, saved = make_suite(GROUPS, run)
    document = suite.execute()
    assert [i.phase for i in asked] == ["ceilings"] + ["checks"] * 2 + ["timings"] * 2
    assert asked[3].states == {"n1": "passed", "n2": "passed"}
    assert asked[3].ceilings == MACHINE["ceilings"]
    assert {i.seed for i in asked[1:]} == {document["seed"]}
    assert [row["name"] for row in document["rows"]] == ["later", "n1", "n2", "r1", "nt", "rt"]
    assert exit_code(document["rows"]) == 0
    assert len(saved) == 5


def test_a_process_that_dies_takes_only_its_own_rest_along():
    def run(instruction):
        if instruction.phase == "ceilings":
            return [MACHINE], None
        if instruction.group == "norm":
            return [{"kind": "check", "name": "n1", "state": "passed"}], "its process ended with -6"
        return [{"kind": "check", "name": "r1", "state": "passed"}], None

    suite, _ = make_suite(GROUPS, run)
    rows = {row["name"]: row for row in suite.execute()["rows"]}
    assert rows["n1"]["state"] == rows["r1"]["state"] == "passed"
    assert (rows["n2"]["state"], rows["n2"]["why"]) == ("error", "its process ended with -6")
    assert rows["rt"]["why"] == "its process says nothing"


def test_the_time_limit_holds_for_everything_together():
    clock, asked = Clock(), []

    def run(instruction):
        asked.append(instruction.seconds)
        clock.now_s += 40
        return ([MACHINE], None) if instruction.phase == "ceilings" else ([], "killed")

    suite, _ = make_suite(GROUPS[:1], run, clock, time_limit_s=60)
    rows = suite.execute()["rows"]
    assert asked == [60, 20]
    assert [row["state"] for row in rows] == ["error", "error", "not run"]
    assert rows[-1]["why"] == "time limit"


def test_without_ceilings_the_checks_still_run():
    suite, _ = make_suite(GROUPS, lambda _: ([], "out of memory"))
    document = suite.execute()
    assert document["why_no_ceilings"] == "out of memory"
    assert [row["why"] for row in document["rows"] if row["kind"] == "timing"] == [
        "there are no ceilings"
    ] * 2
    assert "no ceilings: out of memory" in as_table(document)


def test_the_table_names_what_failed_and_times_the_rest():
    rows = [
        {"group": "g", "kind": "check", "name": "a", "state": "passed"},
        {"group": "g", "kind": "check", "name": "b", "state": "failed", "error": 1, "tolerance": 0},
        *timed(Timing("t of a", "a", work), states={"a": "passed"}),
    ]
    table = as_table(MACHINE["machine"] | {"ceilings": MACHINE["ceilings"], "rows": rows})
    assert "a GPU: copy 4.00 TB/s, bf16 product 800 TFLOP/s" in table
    assert "1 of 2 checks passed\n  failed: g / b: error 1 > 0" in table
    assert table.splitlines()[-1].split() == [
        "t",
        "of",
        "a",
        "2.0",
        "2.0",
        "1.0",
        "1.0",
        "50",
        "%",
        "2000",
    ]


def test_the_list_shows_what_is_not_there():
    assert "later\n  not there: to come" in as_list(GROUPS)
    assert "  timing  rt (after: r1)" in as_list(GROUPS)


def test_every_group_of_the_project_can_be_listed_without_a_gpu(capsys):
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    for name in group_names():
        assert load_group(name).missing is None, load_group(name).missing
        assert name in printed
    assert "end_to_end\n  not there" in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2(capsys):
    assert main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_wrong_options_end_with_2(capsys):
    assert main(["--tiem-limit", "3"]) == 2
    assert main(["--only", "no such check", "--list"]) == 2
    assert "nothing has 'no such check'" in capsys.readouterr().err


def test_the_script_needs_only_what_the_gpu_machine_has():
    code = (
        "import sys; sys.path.insert(0, '.'); import scripts.gpu_suite as s; s.main(['--list']);"
        "print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"msgspec", "zmq", "cyclopts", "tokenizers", "frontend"} & set(done.stderr.split())
