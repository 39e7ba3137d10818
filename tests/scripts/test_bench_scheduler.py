"""The scheduler's benchmark runs, needs no torch, and reports every part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks.scheduler import BLOCK_SIZE, PROMPT_LEN, as_table, make_prompts

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench.py"


@pytest.mark.parametrize(("spread", "num_boundaries"), [(True, 1), (False, 16)])
def test_block_boundaries_are_spread_over_the_steps_or_all_in_one(spread, num_boundaries):
    lengths = [len(prompt) for prompt in make_prompts(16, spread)]
    assert sum((length + 5) % BLOCK_SIZE == 5 for length in lengths) == num_boundaries
    assert min(lengths) == PROMPT_LEN


def test_no_two_prompts_share_a_block():
    first_blocks = {tuple(prompt[:BLOCK_SIZE]) for prompt in make_prompts(100, spread=True)}
    assert len(first_blocks) == 100


def test_a_quick_run_in_a_process_of_its_own_measures_every_part_without_torch(tmp_path):
    """The script itself fails if torch was imported."""
    file = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "scheduler", "--quick", "--json", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert as_table(result) in run.stderr
    rows = [(row["num_running"], row["block_boundaries"]) for row in result["decode"]]
    assert rows == [(4, "spread"), (4, "lockstep"), (16, "spread"), (16, "lockstep")]
    for row in result["decode"]:
        for part in ("schedule", "update", "step"):
            assert 0 < row[part]["median"] <= row[part]["p99"]
    parts = [
        value for name, value in result["arrival"].items() if name not in ("all", "num_tokens")
    ]
    assert all(value > 0 for value in parts)
    assert all(row["num_bytes"] > 0 for row in result["watching"])
