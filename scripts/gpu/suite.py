"""The whole run: ceilings first, then every group's checks side by side, then what is measured,
one group at a time.

Owns the phases, the time that each may take and what becomes of a process that dies. Must not know
torch or kernels.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.gpu.frame import Group, Row
from scripts.gpu.worker import Instruction

ROOT = Path(__file__).resolve().parents[2]
CHECKS_AT_ONCE = 8
"""Compiling takes most of the checks' time and a core each; the GPU is shared meanwhile, which no
check minds."""
GROUP_LIMIT_S = 180.0
"""A group that takes longer hangs."""

RunWorker = Callable[[Instruction], tuple[list[Row], str | None]]
"""Rows that a worker wrote, and why it ended early."""


def run_process(instruction: Instruction) -> tuple[list[Row], str | None]:
    """A `RunWorker` that starts a process, and kills it when its time is over."""
    with tempfile.TemporaryDirectory() as folder:
        rows_path, log_path = Path(folder, "rows"), Path(folder, "log")
        rows_path.touch()
        text = json.dumps(dataclasses.asdict(instruction))
        command = [sys.executable, "-m", "scripts.gpu.worker", text, str(rows_path)]
        why = None
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdout=log, stderr=log
            )
            try:
                # it stops by itself at its deadline, unless a kernel or the compiler hangs
                if process.wait(timeout=instruction.seconds + 10):
                    lines = log_path.read_text().strip().splitlines() or ["no output"]
                    why = f"its process ended with {process.returncode}: {lines[-1][:400]}"
            except subprocess.TimeoutExpired:
                why = f"its process was killed after {instruction.seconds + 10:.0f} s"
            finally:
                process.kill()
                process.wait()
        rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
        return rows, why


def _environment() -> dict[str, str]:
    """References are computed on the CPU: its cores are shared by the checks at work."""
    threads = max(1, len(os.sched_getaffinity(0)) // CHECKS_AT_ONCE)
    return {"OMP_NUM_THREADS": str(threads)} | os.environ


@dataclasses.dataclass(slots=True)
class Suite:
    """A run over some groups.

    Attributes:
        groups: already selected with `only`.
        save: gets the document after every phase and group.
        seed: of all random inputs; in the document, so that a failure can be had again.
    """

    groups: Sequence[Group]
    only: str
    time_limit_s: float
    run: RunWorker
    clock: Callable[[], float]
    save: Callable[[dict[str, Any]], None]
    seed: int = 0
    document: dict[str, Any] = dataclasses.field(default_factory=lambda: {"rows": []})

    def execute(self) -> dict[str, Any]:
        """All phases. Returns the document: machine, ceilings, rows."""
        start_s = self.clock()
        deadline_s = start_s + self.time_limit_s
        self.document["seed"] = self.seed
        self._measure_ceilings(deadline_s)
        self.document["rows"] = [row for row in map(_group_row, self.groups) if row is not None]
        there = [group for group in self.groups if _group_row(group) is None]
        # whole models take longest: begun last, everything would wait for them; and their figures
        # matter most, should time be up
        longest_first = sorted(there, key=lambda group: not group.needs_engine)
        with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
            for rows in pool.map(lambda group: self._check(group, deadline_s), longest_first):
                self._add(rows)
        for group in longest_first:
            self._add(self._time(group, deadline_s))
        self.document["seconds"] = round(self.clock() - start_s, 1)
        self.save(self.document)
        return self.document

    def _measure_ceilings(self, deadline_s: float) -> None:
        rows, why = self.run(Instruction(phase="ceilings", seconds=self._seconds(deadline_s)))
        if rows:
            self.document |= rows[0]["machine"] | {"ceilings": rows[0]["ceilings"]}
        else:
            self.document |= {"ceilings": None, "why_no_ceilings": why}

    def _check(self, group: Group, deadline_s: float) -> list[Row]:
        kinds = {check.name: "check" for check in group.checks}
        return self._run_group(group, kinds, "checks", deadline_s)

    def _time(self, group: Group, deadline_s: float) -> list[Row]:
        kinds = {timing.name: "timing" for timing in group.timings}
        kinds |= {figure.name: "figure" for figure in group.figures}
        if self.document["ceilings"] is None:
            return _absent(group, kinds, "error", "there are no ceilings")
        states = {
            row["name"]: row["state"]
            for row in self.document["rows"]
            if row["group"] == group.name and row["kind"] == "check"
        }
        return self._run_group(
            group,
            kinds,
            "timings",
            deadline_s,
            states=states,
            ceilings=self.document["ceilings"],
        )

    def _run_group(
        self, group: Group, kinds: dict[str, str], phase: str, deadline_s: float, **more: Any
    ) -> list[Row]:
        """`kinds`: of the rows that are due, by name."""
        if not kinds:
            return []
        seconds = self._seconds(deadline_s)
        if seconds <= 0:
            return _absent(group, kinds, "not run", "time limit")
        rows, why = self.run(
            Instruction(
                phase=phase,
                group=group.name,
                only=self.only,
                seconds=seconds,
                seed=self.seed,
                **more,
            )
        )
        known = {row["name"] for row in rows}
        rest = {name: kind for name, kind in kinds.items() if name not in known}
        rows = [{"group": group.name} | row for row in rows]
        return rows + _absent(group, rest, "error", why or "its process says nothing")

    def _seconds(self, deadline_s: float) -> float:
        return min(deadline_s - self.clock(), GROUP_LIMIT_S)

    def _add(self, rows: list[Row]) -> None:
        self.document["rows"] += rows
        self.save(self.document)


def _absent(group: Group, kinds: dict[str, str], state: str, why: str) -> list[Row]:
    return [
        {"group": group.name, "kind": kind, "name": name, "state": state, "why": why}
        for name, kind in kinds.items()
    ]


def _group_row(group: Group) -> Row | None:
    """Of a group that does not run."""
    if group.broken is not None:
        state, why = "error", group.broken
    elif group.missing is not None:
        state, why = "not there", group.missing
    else:
        return None
    return {"group": group.name, "kind": "group", "name": group.name, "state": state, "why": why}
