"""Short runs of `make chaos` and `make soak`, and their end when the driver is killed."""

import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.processes import MARK, is_gone, marked_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
SIX_CLIENTS = ("--processes", 3, "--clients-per-process", 2, "--cases", 9)


def start(module, *options, **variables):
    command = [sys.executable, "-m", f"tests.chaos.{module}", *map(str, options)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(module, *options):
    process = start(module, *options)
    output, errors = process.communicate()
    assert process.returncode == 0, f"{output}\n{errors}"
    return json.loads(output.splitlines()[-1])


def test_a_short_chaos_loses_nothing():
    document = run("run", "--time", 6, "--min-faults", 4, "--seed", 253, *SIX_CLIENTS)
    assert document["tokens_compared"] > 100
    assert sum(document["faults_of_the_daemon"].values()) >= 4
    assert sum(document["faults_of_client_processes"].values()) >= 1
    assert document["resumed_requests"] >= 1
    found = {name: document[name] for name in ("lost", "wrong", "duplicates", "orphans")}
    assert found == dict.fromkeys(found, 0)


def test_a_killed_driver_leaves_no_process():
    mark = secrets.token_hex(8)
    driver = start("run", "--time", 120, *SIX_CLIENTS, **{MARK: mark})
    try:
        deadline_s = time.monotonic() + 120
        while len(marked_processes(mark)) < 1 + 1 + 3:  # driver, daemon, clients
            assert driver.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
    finally:
        driver.kill()
        driver.communicate()
    deadline_s = time.monotonic() + 20
    while left := [pid for pid in marked_processes(mark) if not is_gone(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.05)


def test_a_short_soak_grows_by_nothing(tmp_path):
    document = run(
        "soak", "--time", 5, "--processes", 2, "--clients-per-process", 3, "--cases", 9,
        "--num-blocks", 300, "--requests-per-client", 5, "--picture", tmp_path / "soak.svg",
    )  # fmt: skip
    quantities = {(row["process"], row["quantity"]) for row in document["growth"]}
    assert ("daemon", "memory_bytes") in quantities
    assert ("client0", "num_descriptors") in quantities
    assert document["tokens_compared"] > 0
    assert (document["lost"], document["wrong"]) == (0, 0)
    assert "time per output token" in (tmp_path / "soak.svg").read_text()
