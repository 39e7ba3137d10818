"""The checks of a tree on a GPU: pytest in as many processes as fit, with a limit of time."""

import collections
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.gpu.carry import CARRIED, ROOT
from scripts.gpu.timing import ROWS_VARIABLE, Row

_MOST_PROCESSES = 15
_GIB_A_PROCESS = 8
"""Two layers of a published model, and transformers' beside them."""
_MOST_LINES = 20


def num_processes(num_cores: int, gpu_bytes: int) -> int:
    """As many test processes as a machine has cores and memory for."""
    fit = min(num_cores - 1, gpu_bytes // (_GIB_A_PROCESS << 30), _MOST_PROCESSES)
    return max(1, fit)


def run_checks(
    paths: Sequence[str], *, seconds: float, seed: int, processes: int, device: str = "cuda"
) -> dict[str, Any]:
    """Numbers of tests that passed and were skipped; names and reasons of those that failed, and
    names of those that did not run. All processes are killed when the time is over."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scripts.gpu.pytest_rows"]
    command += ["-p", "no:cacheprovider", "-n", str(processes), "--dist", "worksteal", *paths]
    with tempfile.TemporaryDirectory() as folder:
        rows_path, log_path = Path(folder, "rows"), Path(folder, "log")
        rows_path.touch()
        searched = [str(ROOT), os.environ.get("PYTHONPATH"), str(CARRIED)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in searched if path),
            "TEST_DEVICE": device,
            "TEST_SEED": str(seed),
            ROWS_VARIABLE: str(rows_path),
        }
        why = None
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                if process.wait(timeout=seconds) > 1:  # 1: some failed
                    lines = log_path.read_text().strip().splitlines() or ["no output"]
                    why = f"pytest ended with {process.returncode}: {lines[-1][:400]}"
            except subprocess.TimeoutExpired:
                why = f"cut off after {seconds:.0f} s"
            finally:
                _kill_all(process)
        rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    return _summary(rows, why) | {"processes": processes}


def _kill_all(process: "subprocess.Popen[bytes]") -> None:
    """It and its children; that some are gone already is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _summary(rows: list[Row], why: str | None) -> dict[str, Any]:
    """A test that failed in any of its phases failed; what ended a process says why."""
    collected: list[str] = []
    ended: dict[str, Row] = {}
    for row in rows:
        if "collected" in row:
            collected = row["collected"]
        elif row["name"] not in ended or ended[row["name"]]["state"] != "failed":
            ended[row["name"]] = row
    counts = collections.Counter(row["state"] for row in ended.values())
    failed = [row for row in ended.values() if row["state"] == "failed"]
    return {
        "passed": counts["passed"],
        "skipped": counts["skipped"],
        "failed": [{"name": row["name"], "why": row["why"]} for row in failed],
        "not_run": [name for name in collected if name not in ended],
        "why_not_run": why,
    }


def checks_table(checks: dict[str, Any]) -> list[str]:
    """Lines: numbers, then what failed, and what did not run, a file a line."""
    failed, not_run = checks["failed"], checks["not_run"]
    lines = [
        f"checks: {checks['passed']} passed, {checks['skipped']} skipped, {len(failed)} failed, "
        f"{len(not_run)} not run" + (f": {checks['why_not_run']}" if checks["why_not_run"] else "")
    ]
    lines += [f"  failed: {row['name']}: {row['why'][:160]}" for row in failed[:_MOST_LINES]]
    if len(failed) > _MOST_LINES:
        lines.append(f"  failed: {len(failed) - _MOST_LINES} more, in the document")
    files = collections.Counter(name.partition("::")[0] for name in not_run)
    lines += [f"  not run: {number} of {file}" for file, number in files.items()]
    return lines
