"""What a run on a GPU checks and watches, and its runs with names; rehearsed without a GPU."""

import subprocess
import time
from pathlib import Path

import pytest
import torch

from scripts.gpu import checks, clocks
from scripts.gpu.runs import named_runs
from scripts.gpu.timing import FAMILIES, ROWS_VARIABLE, load_family

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", named_runs())
def test_a_named_run_ends_in_its_minutes_and_predicts_only_what_it_times(name):
    named = named_runs()[name]
    assert named.check_s < named.seconds <= 480
    assert all((ROOT / path).exists() for path in named.checks)
    groups = [group for family in FAMILIES for group in load_family(family)]
    timed = {n for group in groups for n in group.names(named.only)}
    assert all(
        any(text in each.name or each.names([text]) for each in groups) for text in named.only
    )
    assert timed >= named.predicted.keys()
    for group in groups:
        for row in named.predicted.keys() & group.timings.keys():
            assert named.predicted[row].keys() == {"median_us"}


TESTS = """
import os
import pathlib
import time
import pytest

def test_good():
    assert os.environ["TEST_DEVICE"] == "cpu"

def test_bad():
    assert 1 == 2, "one is not two"

@pytest.mark.skip(reason="not here")
def test_skipped(): ...

def test_whose_process_dies():
    os._exit(3)

@pytest.fixture
def broken():
    raise ValueError("no fixture")

def test_of_a_broken_fixture(broken): ...

def test_that_hangs():
    pathlib.Path(__file__).with_name("hangs").touch()
    time.sleep(99)

def test_behind_it(): ...
"""


def test_checks_tell_what_failed_and_what_was_cut_off(tmp_path, monkeypatch):
    """Their time is over when one of them hangs."""
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)

    class Process(subprocess.Popen):
        def __init__(self, *args, env, **options):
            super().__init__(*args, env=env, **options)
            self.rows = Path(env[ROWS_VARIABLE])

        def is_told_of_all_before(self):  # a row comes a moment after its test
            last = "test_of_a_broken_fixture"
            return (tmp_path / "hangs").exists() and f'{last}", "state' in self.rows.read_text()

        def wait(self, timeout=None):
            while timeout is not None and not self.is_told_of_all_before():
                if self.poll() is not None:
                    return self.returncode
                time.sleep(0.05)
            if timeout is not None:
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Process)
    found = checks.run_checks([str(path)], seconds=7, seed=1, processes=1, device="cpu")
    assert (found["passed"], found["skipped"]) == (1, 1)
    reasons = {row["name"].partition("::")[2]: row["why"] for row in found["failed"]}
    assert reasons.keys() == {"test_bad", "test_whose_process_dies", "test_of_a_broken_fixture"}
    assert "one is not two" in reasons["test_bad"]
    assert "no fixture" in reasons["test_of_a_broken_fixture"]
    assert "crashed" in reasons["test_whose_process_dies"]
    not_run = [name.partition("::")[2] for name in found["not_run"]]
    assert not_run == ["test_that_hangs", "test_behind_it"]
    assert found["why_not_run"] == "cut off after 7 s"
    assert "  not run: 2 of " in "\n".join(checks.checks_table(found))


def test_as_many_processes_as_a_card_has_room_for():
    assert [checks.num_processes(*machine) for machine in ((16, 139 << 30), (16, 24 << 30))] == [
        15,
        3,
    ]
    assert checks.num_processes(1, 4 << 30) == 1


def test_clocks_are_the_last_sample_or_nothing(tmp_path, monkeypatch):
    with clocks.watched_clocks() as read:
        assert read() == {} or torch.cuda.is_available()
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf '1980, 650.5\\n1755, 690.25\\n17'\nexec sleep 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with clocks.watched_clocks() as read:
        while not read():
            pass
        assert read() == {"sm_mhz": 1755.0, "watts": 690.25}
