"""The benchmark of growth runs without torch, measures every case, and draws it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.growth import CASES, as_table, measured, prepared

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.mark.slow
def test_a_quick_run_measures_every_case_without_torch_and_draws_it(tmp_path):
    """The script itself fails if torch was imported."""
    file, picture = tmp_path / "result.json", tmp_path / "growth.svg"
    command = [sys.executable, str(SCRIPT), "growth", "--quick"]
    command += ["--json", str(file), "--picture", str(picture)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(file.read_text())["growth"]
    assert as_table(result) in run.stderr
    assert {what: [row["size"] for row in rows] for what, rows in result.items()} == {
        what: list(sizes[:2]) for what, (_, sizes) in CASES.items()
    }
    assert all(row["step_us"] > 0 for rows in result.values() for row in rows)
    assert picture.read_text().count("<svg") == 1


def test_the_cases_are_what_they_say():
    assert prepared("running", 8).scheduler.get_request_counts() == (8, 0)
    assert prepared("waiting", 9).scheduler.get_request_counts() == (64, 9)
    head = prepared("waiting head", 1000)
    head.step()
    assert head.scheduler.get_request_counts() == (64, 1)
    cache = prepared("cache", 1000).kv_cache
    assert cache.num_blocks_cached == cache.num_blocks - cache.num_blocks_in_use
    assert len(prepared("clients", 10)._clients) == 10
    assert measured("running", 4, 8).keys() == {"size", "step_us", "request_us"}


def test_growth_is_told_as_an_exponent():
    rows = [{"size": 10, "step_us": 5.0}, {"size": 100, "step_us": 50.0}]
    assert as_table({"context": rows}).splitlines()[-1].split() == ["100", "50", "1.00"]
