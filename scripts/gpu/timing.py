"""What can be timed; a time only for what passes its check in the same process."""

import importlib
import json
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""Result of one check or timing, as it goes into the JSON document."""
ROWS_VARIABLE = "GPU_RUN_ROWS"
"""Names the file of a child process's rows. A process that dies leaves what it had written."""


def emit(row: Row) -> None:
    """A line of JSON in the file of `ROWS_VARIABLE`."""
    with Path(os.environ[ROWS_VARIABLE]).open("a") as file:
        print(json.dumps(row), file=file)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a timing times.

    Attributes:
        call: launches the kernel; allocates nothing that a CUDA graph could not.
        num_bytes: the fewest that must move through device memory.
        num_flops: operations of the matrix units; 0 where bytes bound.
        fits_graph: whether `call` may be recorded in a CUDA graph; not if it replays one or waits.
    """

    call: Callable[[], object]
    num_bytes: float
    num_flops: float = 0.0
    fits_graph: bool = True


@dataclass(frozen=True, slots=True)
class TimingGroup:
    """Timings that stand or fall with one check.

    Attributes:
        check: gives the error; NaN never passes.
        timings: what makes the work, by name.
        figures: what is measured in a way of its own, such as a whole daemon's throughput; gives
            numbers by name, with their units in it.
    """

    name: str
    check: Callable[[], float]
    tolerance: float
    timings: Mapping[str, Callable[[], Work]] = field(default_factory=dict)
    figures: Mapping[str, Callable[[], Mapping[str, Any]]] = field(default_factory=dict)

    def names(self, only: Sequence[str] = ()) -> list[str]:
        """Those with one of these texts in them, or all if one is in the group's name, or if there
        are none."""
        names = [*self.timings, *self.figures]
        if not only or any(text in self.name for text in only):
            return names
        return [name for name in names if any(text in name for text in only)]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the machine can do, measured in the same run; bytes and operations a second."""

    copy_bytes_s: float
    matmul_flop_s: float

    def floor_us(self, work: Work) -> float:
        """No version takes much less."""
        return 1e6 * max(work.num_bytes / self.copy_bytes_s, work.num_flops / self.matmul_flop_s)


def run_group(
    group: TimingGroup,
    *,
    only: Sequence[str],
    ceilings: Ceilings,
    measure: Callable[..., dict[str, Any]],
    clock: Callable[[], float],
    deadline_s: float,
    emit: Callable[[Row], None],
) -> None:
    """The check, then what `only` names; `emit` gets a row for each as it is known.
    `measure` times a call, `in_graph` or not; it gives at least `median_us`."""
    names = group.names(only)
    if not names or clock() >= deadline_s:
        return
    try:
        error = float(group.check())
        passed = error <= group.tolerance  # so that NaN fails
        refusal = None if passed else f"its check gives {error:g}, more than {group.tolerance:g}"
    except Exception as problem:
        refusal = f"its check: {_describe(problem)}"
    for name in names:
        row: Row = {"group": group.name, "name": name}
        if refusal is not None:
            emit(row | {"state": "refused", "why": refusal})
            continue
        if clock() >= deadline_s:
            return
        try:
            emit(row | _result(group, name, ceilings, measure))
        except Exception as problem:
            emit(row | {"state": "error", "why": _describe(problem)})


def _result(
    group: TimingGroup, name: str, ceilings: Ceilings, measure: Callable[..., dict[str, Any]]
) -> Row:
    """Of one timing or figure. Nothing of its work is left when this returns: the next one may
    need all of the device's memory."""
    if name in group.figures:
        return {"state": "measured", "figures": dict(group.figures[name]())}
    work = group.timings[name]()
    times = measure(work.call, in_graph=work.fits_graph)
    return {"state": "timed"} | times | _rates(work, ceilings, times["median_us"])


def _rates(work: Work, ceilings: Ceilings, median_us: float) -> Row:
    floor_us = ceilings.floor_us(work)
    rates: Row = {
        "num_bytes": work.num_bytes,
        "gigabytes_s": round(work.num_bytes / median_us / 1e3, 1),
        "floor_us": round(floor_us, 2),
        "of_floor": round(floor_us / median_us, 3),
    }
    if work.num_flops:
        rates["num_flops"] = work.num_flops
        rates["teraflop_s"] = round(work.num_flops / median_us / 1e6, 1)
    return rates


def _describe(problem: Exception) -> str:
    """The error, and the innermost line of ours."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if "site-packages" not in f[0]]
    where = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:400]}{where}"


FAMILIES = {
    "daemon": "scripts.gpu.daemon_timings:daemon_timings",
    "steps": "scripts.gpu.step_timings:step_timings",
    "few rows": "scripts.gpu.few_rows_timings:few_rows_timings",
    "hybrids": "scripts.gpu.step_timings:hybrid_timings",
    "quantised": "scripts.gpu.step_timings:quantised_timings",
    "kernels": "scripts.gpu.kernel_timings:all_timings",
    "prompts": "scripts.gpu.prompt_timings:prompt_timings",
    "crossings": "scripts.gpu.kernel_timings:crossing_timings",
    "long": "scripts.gpu.daemon_timings:long_timings",
    "arriving": "scripts.gpu.daemon_timings:arriving_timings",
}
"""In the order of their worth, should time be up. A process of its own costs each some seconds."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker process does.

    Attributes:
        family: see `FAMILIES`; empty to describe the machine and measure its ceilings.
        seconds: that it has.
        seed: of all random inputs.
        skip: groups that are done, or ended a process before.
    """

    family: str
    only: Sequence[str]
    seconds: float
    seed: int
    ceilings: dict[str, float] | None = None
    skip: tuple[str, ...] = ()


def load_family(name: str) -> list[TimingGroup]:
    module, _, function = FAMILIES[name].partition(":")
    groups: list[TimingGroup] = getattr(importlib.import_module(module), function)()
    return groups
