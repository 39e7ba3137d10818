"""Timings of one family in a process of its own: `python -m scripts.gpu.worker`, see `Instruction`.

A kernel that reads outside its memory spoils its process's use of the GPU, and one that never ends
must be killed: neither may take the other families along.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from scripts.gpu.timing import Ceilings, Row, TimingGroup, run_group

FAMILIES = {
    "daemon": "scripts.gpu.daemon_timings:daemon_timings",
    "steps": "scripts.gpu.step_timings:step_timings",
    "attention": "scripts.gpu.kernel_timings:attention_timings",
    "products": "scripts.gpu.kernel_timings:product_timings",
    "elementwise": "scripts.gpu.kernel_timings:elementwise_timings",
    "sampling": "scripts.gpu.kernel_timings:sampling_timings",
}
"""In the order of their worth, should time be up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker does.

    Attributes:
        family: see `FAMILIES`; empty to describe the machine and measure its ceilings.
        seconds: that it has.
        seed: of all random inputs.
        rows_path: gets a line of JSON for each result as it is known.
    """

    family: str
    only: str
    seconds: float
    seed: int
    rows_path: str
    ceilings: dict[str, float] | None = None


def load_family(name: str) -> list[TimingGroup]:
    module, _, function = FAMILIES[name].partition(":")
    groups: list[TimingGroup] = getattr(importlib.import_module(module), function)()
    return groups


def work(instruction: Instruction) -> None:
    """Append rows to the file."""
    import torch

    from scripts.gpu.measuring import CudaTimer, describe_device, measure_ceilings

    deadline_s = time.monotonic() + instruction.seconds
    torch.manual_seed(instruction.seed)
    with Path(instruction.rows_path).open("a") as file:

        def emit(row: Row) -> None:
            print(json.dumps(row), file=file, flush=True)

        if instruction.ceilings is None:
            ceilings: dict[str, Any] = dataclasses.asdict(measure_ceilings())
            emit({"device": describe_device(), "ceilings": ceilings})
            return
        timer = CudaTimer()
        for group in load_family(instruction.family):
            run_group(
                group,
                only=instruction.only,
                ceilings=Ceilings(**instruction.ceilings),
                timer=timer,
                clock=time.monotonic,
                deadline_s=deadline_s,
                emit=emit,
            )


if __name__ == "__main__":
    work(Instruction(**json.loads(sys.argv[1])))
