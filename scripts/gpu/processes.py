"""Check files and families of timings in processes of their own, each with a limit of time."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from scripts.gpu.timing import ROWS_VARIABLE, Instruction, Row

ROOT = Path(__file__).resolve().parents[2]
CHECKS_AT_ONCE = 8
"""Compiling takes most of the checks' time and a core each; the GPU is shared meanwhile."""


@contextlib.contextmanager
def unpacked_wheels(folder: Path) -> Iterator[None]:
    """What a folder's wheels hold can be imported inside, here and by child processes. Nothing that
    is installed is replaced. Raises FileNotFoundError: there are none."""
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FileNotFoundError(f"{folder} has no wheels; docs/gpu.md says how to get them")
    with tempfile.TemporaryDirectory(prefix="wheels-") as target:
        for wheel in map(zipfile.ZipFile, wheels):
            modules = {name.partition("/")[0].removesuffix(".py") for name in wheel.namelist()}
            if not all(importlib.util.find_spec(name) for name in modules if name.isidentifier()):
                wheel.extractall(target)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{target}{os.pathsep}{before}" if before else target
        sys.path.insert(0, target)
        try:
            yield
        finally:
            sys.path.remove(target)
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def check_file(path: str, seconds: float, seed: int, *, uses_gpu: bool) -> list[Row]:
    """Run a file of tests; one row a test."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scripts.gpu.pytest_rows"]
    command += ["-p", "no:cacheprovider", path] + ([] if uses_gpu else ["-m", "gpu"])
    # references are computed on the CPU: its cores are shared by the checks at work
    threads = max(1, len(os.sched_getaffinity(0)) // CHECKS_AT_ONCE)
    environment = {"OMP_NUM_THREADS": str(threads), "TEST_SEED": str(seed)}
    environment |= {"TEST_DEVICE": "cuda"} if uses_gpu else {}
    rows, lost = _run(command, environment, seconds, is_pytest=True)
    if not rows and lost is not None:
        return [{"file": path, "name": path} | lost]
    found = {row["name"]: row for row in rows}  # a later row says more
    lost = lost or {"state": "error", "why": "it has no result"}
    return [
        {"file": path} | (row | lost if row["state"] == "found" else row) for row in found.values()
    ]


def run_worker(instruction: Instruction) -> tuple[list[Row], Row | None]:
    """Rows of a family's timings, and state and reason of what its process did not come to."""
    described = json.dumps(dataclasses.asdict(instruction))
    command = [sys.executable, "-m", "scripts.gpu.worker", described]
    return _run(command, {}, instruction.seconds, is_pytest=False)


def _run(
    command: list[str], environment: Mapping[str, str], seconds: float, *, is_pytest: bool
) -> tuple[list[Row], Row | None]:
    """Rows that the process wrote; state and reason of the others, if it ended early. It is killed
    when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        rows_path, log_path = Path(folder, "rows"), Path(folder, "log")
        rows_path.touch()
        lost = None
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, ROWS_VARIABLE: str(rows_path), **environment},
                stdout=log,
                stderr=log,
            )
            try:
                code = process.wait(timeout=seconds)
                # pytest ends with 1 after failed tests, with 5 if there are none
                has_rows = rows_path.stat().st_size > 0
                if code and not (is_pytest and (code == 5 or (code == 1 and has_rows))):
                    lines = log_path.read_text().strip().splitlines() or ["no output"]
                    why = f"its process ended with {code}: {lines[-1][:400]}"
                    lost = {"state": "error", "why": why}
            except subprocess.TimeoutExpired:
                why = f"its process was killed after {seconds:.0f} s"
                lost = {"state": "not run", "why": why}
            finally:
                process.kill()
                process.wait()
        return [json.loads(line) for line in rows_path.read_text().splitlines()], lost
