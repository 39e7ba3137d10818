"""The GPU suite's phases, table and command line, with fake processes; needs no GPU."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_checks import Clock, fails, timed, work

from scripts.gpu.frame import Check, Figure, Group, Timing, exit_code
from scripts.gpu.registry import NOT_THERE, group_names, load_group
from scripts.gpu.report import as_list, as_table
from scripts.gpu.suite import Suite
from scripts.gpu.wheels import WheelsNotInstalled
from scripts.gpu_suite import main, with_wheels

ROOT = Path(__file__).parents[2]


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


def test_groups_of_the_engine_come_first_and_their_figures_are_missed_by_name():
    asked = []

    def run(instruction):
        asked.append((instruction.phase, instruction.group))
        if instruction.phase == "ceilings":
            return [MACHINE], None
        if instruction.phase == "checks":
            return [{"kind": "check", "name": "whole", "state": "passed"}], None
        return [], "killed"

    whole = (Check("whole", fails, 0),)
    groups = [
        Group("a", whole, (Timing("t", "whole", work),)),
        Group("engine", whole, figures=(Figure("f", "whole", dict),), needs_engine=True),
    ]
    suite, _ = make_suite(groups, run)
    rows = suite.execute()["rows"]
    assert sorted(asked[1:3]) == [("checks", "a"), ("checks", "engine")]
    assert asked[3:] == [("timings", "engine"), ("timings", "a")]
    last = [(row["kind"], row["name"], row["state"], row["why"]) for row in rows[-2:]]
    assert last == [("figure", "f", "error", "killed"), ("timing", "t", "error", "killed")]


def test_a_group_that_cannot_be_loaded_is_an_error():
    broken = load_group("no_such_group")
    assert "ModuleNotFoundError" in broken.broken
    suite, _ = make_suite([broken, GROUPS[2]], lambda _: ([MACHINE], None))
    rows = suite.execute()["rows"]
    assert [row["state"] for row in rows] == ["error", "not there"]
    assert exit_code(rows) == 1
    assert "no_such_group\n  broken: ModuleNotFoundError" in as_list([broken])


def test_without_its_wheels_the_engine_is_an_error_and_kernels_still_run(monkeypatch):
    def no_wheels():
        raise WheelsNotInstalled("no wheels here")

    monkeypatch.setattr("scripts.gpu_suite.installed_wheels", no_wheels)
    check = (Check("c", fails, 0),)
    with contextlib.ExitStack() as wheels:
        kernels, engine = with_wheels(
            [Group("k", check), Group("e", check, needs_engine=True)], wheels
        )
    assert (kernels.checks, kernels.broken) == (check, None)
    assert (engine.checks, engine.broken) == ((), "no wheels here")


def test_wheels_are_there_until_the_run_is_over(monkeypatch):
    entered = []

    @contextlib.contextmanager
    def fake_wheels():
        entered.append("in")
        yield
        entered.append("out")

    monkeypatch.setattr("scripts.gpu_suite.installed_wheels", fake_wheels)
    with contextlib.ExitStack() as wheels:
        assert with_wheels(GROUPS, wheels) == GROUPS
        assert entered == ["in"]
    assert entered == ["in", "out"]


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
    checks = []
    for name in group_names():
        group = load_group(name)
        assert group.broken is None, group.broken
        assert name in printed
        checks += [check.name for check in group.checks]
    assert sorted(set(checks)) == sorted(checks)
    for group in NOT_THERE:
        assert f"{group.name}\n  not there: " in printed
        assert group.name not in group_names()


def test_whole_models_and_the_engine_are_in_the_suite():
    needing = {name for name in group_names() if load_group(name).needs_engine}
    assert needing == {"batch_invariance", "decode_steps", "end_to_end", "whole_models"}


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
