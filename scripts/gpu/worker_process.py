"""A family of timings in a process of its own, with a limit of time."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.gpu.carry import CARRIED, ROOT
from scripts.gpu.timing import ROWS_VARIABLE, Instruction, Row


def run_worker(instruction: Instruction) -> tuple[list[Row], Row | None]:
    """Rows of a family's timings, and state and reason of what its process did not come to. It is
    killed when its time is over."""
    described = json.dumps(dataclasses.asdict(instruction))
    command = [sys.executable, "-m", "scripts.gpu.worker", described]
    with tempfile.TemporaryDirectory() as folder:
        rows_path, log_path = Path(folder, "rows"), Path(folder, "log")
        rows_path.touch()
        lost = None
        paths = [path for path in (os.environ.get("PYTHONPATH"), str(CARRIED)) if path]
        environment = {"PYTHONPATH": os.pathsep.join(paths), ROWS_VARIABLE: str(rows_path)}
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log
            )
            try:
                if code := process.wait(timeout=instruction.seconds):
                    lines = log_path.read_text().strip().splitlines() or ["no output"]
                    why = f"its process ended with {code}: {lines[-1][:400]}"
                    lost = {"state": "error", "why": why}
            except subprocess.TimeoutExpired:
                why = f"its process was killed after {instruction.seconds:.0f} s"
                lost = {"state": "not run", "why": why}
            finally:
                process.kill()
                process.wait()
        return [json.loads(line) for line in rows_path.read_text().splitlines()], lost
