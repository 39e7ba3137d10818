"""One phase of one group in a process of its own: what scripts/gpu_suite.py starts.

python -m scripts.gpu.worker INSTRUCTION, which is the JSON of an `Instruction`

A kernel that reads outside its memory spoils its process's use of the GPU, and one that never ends
must be killed: neither may take the other groups along. Owns the worker's side. Rows are written as
they come, so that what was done before the end of a bad process is known.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.gpu.frame import Ceilings, Group, Row, run_checks, run_figures, run_timings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """What a worker does.

    Attributes:
        phase: "ceilings", "checks" or "timings".
        group: name; empty for the ceilings.
        only: see `Group.select`.
        seconds: that it has.
        seed: of all random inputs.
        states: of the group's checks, for its timings.
        ceilings: for timings.
    """

    phase: str
    group: str = ""
    only: str = ""
    seconds: float = 0.0
    seed: int = 0
    states: dict[str, str] = dataclasses.field(default_factory=dict)
    ceilings: dict[str, float] | None = None


def work(instruction: Instruction, rows_path: Path) -> None:
    """Append a line of JSON a row to the file."""
    deadline_s = time.monotonic() + instruction.seconds

    with rows_path.open("a") as file:

        def emit(row: Row) -> None:
            print(json.dumps(row), file=file, flush=True)

        if instruction.phase == "ceilings":
            emit(_ceilings_row())
            return
        # here, so that --list and the tests of the frame need no kernels
        import torch

        from scripts.gpu.registry import load_group

        torch.manual_seed(instruction.seed)
        group = load_group(instruction.group).select(instruction.only)
        if group.broken is not None:
            raise SystemExit(group.broken)
        if instruction.phase == "checks":
            run_checks(group.checks, clock=time.monotonic, deadline_s=deadline_s, emit=emit)
            return
        _measure(group, instruction, deadline_s, emit)


def _measure(
    group: Group, instruction: Instruction, deadline_s: float, emit: Callable[[Row], None]
) -> None:
    from scripts.gpu.measuring import CudaTimer

    assert instruction.ceilings is not None
    states = instruction.states
    if group.timings:  # a timer takes memory of the device
        run_timings(
            group.timings,
            states=states,
            ceilings=Ceilings(**instruction.ceilings),
            timer=CudaTimer(),
            clock=time.monotonic,
            deadline_s=deadline_s,
            emit=emit,
        )
    run_figures(
        group.figures, states=states, clock=time.monotonic, deadline_s=deadline_s, emit=emit
    )


def _ceilings_row() -> dict[str, Any]:
    from scripts.gpu.machine import describe_machine
    from scripts.gpu.measuring import measure_ceilings

    machine = describe_machine()
    ceilings = dataclasses.asdict(measure_ceilings())
    return {"kind": "ceilings", "state": "timed", "machine": machine, "ceilings": ceilings}


if __name__ == "__main__":
    work(Instruction(**json.loads(sys.argv[1])), Path(sys.argv[2]))
