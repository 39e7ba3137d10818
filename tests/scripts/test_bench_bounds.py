"""The measurement of growth runs, and its document has every phase."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench.py"


def test_all_phases_are_measured_and_leave_no_descriptor(tmp_path):
    small = ["--num-queued", "50", "--num-clients", "96", "--num-requests", "50", "--stop-s", "1"]
    subprocess.run(
        [sys.executable, SCRIPT, "bounds", *small, "--json", tmp_path / "d.json"],
        check=True,
        timeout=300,
    )
    phases = json.loads((tmp_path / "d.json").read_text())["phases"]
    assert [phase["phase"] for phase in phases] == [
        *("idle", "warm-up", "50 queued, 1", "50 queued, 2", "50 queued, 3"),
        *("96 clients, 1", "96 clients, 2", "96 clients, 3", "a client stopped for 1 s"),
        *(f"{done} short requests" for done in (10, 20, 30, 40, 50)),
        "idle again",
    ]
    assert len({phase["daemon"]["num_descriptors"] for phase in phases[1:]}) == 1
    (stopped,) = (phase for phase in phases if "tokens_of_each_stream" in phase)
    assert stopped["tokens_of_each_stream"] == [1900]
