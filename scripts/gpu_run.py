"""Times kernels, whole steps and the daemon on a machine with a GPU; writes one JSON document.

    python3 scripts/gpu_run.py --json run.json [--only TEXT] [--quick] [--run R3]

Needs torch, triton, transformers and numpy; what else is missing comes from the folder that
`python3 -m scripts.gpu.carry` fills. The document is rewritten as results come; what the time limit
cut off stands in it as "not run". `--quick` (three minutes) and `--run` check and time what
scripts/gpu/runs.toml names, and print what is predicted beside it. Exit code 0, 1 if something
failed or did not run, 2 for wrong options, 130 after Ctrl-C.
"""

import functools
import json as json_format
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu.carry import CARRIED, ROOT, commit_of

sys.path.append(str(CARRIED))  # what is installed comes first

from cyclopts import Group, Parameter
from cyclopts.validators import MutuallyExclusive

from scripts.command_line import make_app, run_app
from scripts.gpu.checks import checks_table, num_processes, run_checks
from scripts.gpu.runs import NamedRun, named_runs
from scripts.gpu.timing import FAMILIES, Instruction, Row, load_family
from scripts.gpu.worker_process import run_worker

FAMILY_LIMIT_S = 180.0
"""A family of timings that takes longer hangs."""
FINE = ("timed", "measured")

RunName = Literal["R0", "R1", "R2", "R3", "R4", "R5", "R6", "R7"]
_WHAT = Group("Instead of everything", validator=MutuallyExclusive())

app = make_app("gpu_run", __doc__)


class GpuRun:
    """A run of everything, family by family; `save` gets the document after each. Without a GPU
    nothing is timed, nor checked. `named`: checks what it names first, and puts what it predicts
    into the rows."""

    def __init__(
        self,
        *,
        only: Sequence[str],
        time_limit_s: float,
        seed: int,
        uses_gpu: bool,
        save: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
        named: NamedRun | None = None,
    ) -> None:
        self._named = named
        self._only, self._seed, self._uses_gpu = only, seed, uses_gpu
        self._save, self._clock = save, clock
        self._start_s = clock()
        self._limit_s = time_limit_s
        self.document: dict[str, Any] = {"commit": commit_of(ROOT), "seed": seed}
        self.document |= {"device": None, "ceilings": None, "timings": []}

    def execute(self) -> dict[str, Any]:
        """All families. Returns the document."""
        self._measure_ceilings()
        if self._named is not None:
            self._check(self._named)
        for family in FAMILIES:
            self.document["timings"] += self._time(family)
            self._save(self.document)
        self.document["seconds"] = round(self._clock() - self._start_s, 1)
        self._save(self.document)
        return self.document

    def _seconds_left(self) -> float:
        left = self._start_s + self._limit_s - self._clock()
        return left if self._named is not None else min(left, FAMILY_LIMIT_S)

    def _measure_ceilings(self) -> None:
        if not self._uses_gpu:
            self.document["why_no_ceilings"] = "torch sees no GPU"
            return
        rows, lost = run_worker(Instruction("", "", self._seconds_left(), self._seed))
        if rows:
            self.document |= rows[0]
        else:
            self.document["why_no_ceilings"] = (lost or {}).get("why", "no result")

    def _check(self, named: NamedRun) -> None:
        self.document["question"] = named.question
        self.document["predictions_for"] = named.figures_for
        device = self.document["device"]
        if not named.checks or device is None:
            return
        seconds = min(named.check_s, self._seconds_left())
        processes = num_processes(os.cpu_count() or 1, device["memory_bytes"])
        self.document["checks"] = run_checks(
            named.checks, seconds=seconds, seed=self._seed, processes=processes
        )
        self._save(self.document)

    def _time(self, family: str) -> list[Row]:
        only = () if family in self._only else self._only
        try:
            groups = load_family(family)
        except Exception as error:
            return [{"name": family, "state": "error", "why": f"cannot be imported: {error!r}"}]
        names = {group.name: group.names(only) for group in groups}
        rows: list[Row] = []
        done: list[str] = []
        lost = {"state": "not run", "why": "time limit"}
        if self.document["ceilings"] is None:
            why = f"no ceilings: {self.document['why_no_ceilings']}"
            lost = {"state": "not run", "why": why}
        elif any(names.values()):
            while (seconds := self._seconds_left()) > 0:
                ceilings = self.document["ceilings"]
                instruction = Instruction(family, only, seconds, self._seed, ceilings, tuple(done))
                new, ended = run_worker(instruction)
                rows += new
                known = {row["name"] for row in rows}
                left = [n for n, wanted in names.items() if n not in done and {*wanted} - known]
                if ended is None or not left:
                    break
                # that group ended the process; the others go on in another one
                rows += _lost_rows(left[0], names[left[0]], known, ended)
                done = [name for name in names if name not in left[1:]]
                if not left[1:]:
                    break
        known = {row["name"] for row in rows}
        for group, wanted in names.items():
            rows += _lost_rows(group, wanted, known, lost)
        device = (self.document["device"] or {}).get("name")
        predicted = {} if self._named is None else self._named.predicted
        return [
            row
            | {"device": device}
            | ({"predicted": predicted[row["name"]]} if row["name"] in predicted else {})
            for row in rows
        ]


def _lost_rows(group: str, names: list[str], known: set[str], lost: Row) -> list[Row]:
    return [{"group": group, "name": name} | lost for name in names if name not in known]


def as_table(document: dict[str, Any]) -> str:
    """Checks, a table of what was not timed, then of timings and figures with what was predicted of
    them."""
    timings = document["timings"]
    if document["ceilings"] is None:
        lines = [f"no ceilings: {document['why_no_ceilings']}"]
    else:
        copy, product = document["ceilings"].values()
        lines = [
            f"{document['device']['name']}: copy {copy / 1e12:.2f} TB/s, "
            f"bf16 product {product / 1e12:.0f} TFLOP/s; commit {document['commit']}"
        ]
    if "checks" in document:
        lines += checks_table(document["checks"])
    if "question" in document:
        lines.append(f"{document['question']} (predictions: {document['predictions_for']})")
    wrong = [row for row in timings if row["state"] not in FINE]
    lines += [f"  {row['state']}: {row['name']}: {row.get('why', '')}" for row in wrong]
    timed = [row for row in timings if row["state"] == "timed"]
    width = max((len(row["name"]) for row in timed), default=0)
    if timed:
        heads = ("us", "again", "graph", "floor", "of it", "GB/s", "TFLOP/s", "predicted", "MHz")
        lines.append(" " * width + "".join(f"{head:>10}" for head in heads))
    lines += [_timing_line(row, width) for row in timed]
    for row in timings:
        if row["state"] == "measured":
            numbers = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
            expected = ", ".join(f"{name} {n:g}" for name, n in row.get("predicted", {}).items())
            lines.append(f"{row['name']}: {numbers}" + f" (predicted: {expected})" * bool(expected))
    return "\n".join(lines)


def _timing_line(row: dict[str, Any], width: int) -> str:
    graph_us = row.get("graph_us")
    cells = (
        f"{row['median_us']:.1f}",
        f"{row.get('again_us', 0):.1f}",
        f"{graph_us:.1f}" if isinstance(graph_us, int | float) else "-",
        f"{row['floor_us']:.1f}",
        f"{100 * row['of_floor']:.0f} %",
        f"{row['gigabytes_s']:.0f}",
        f"{row['teraflop_s']:.0f}" if "teraflop_s" in row else "",
        f"{row['predicted']['median_us']:.0f}" if "predicted" in row else "",
        f"{row['sm_mhz']:.0f}" if "sm_mhz" in row else "",
    )
    return f"{row['name']:{width}}" + "".join(f"{cell:>10}" for cell in cells)


@app.default
def gpu_run(
    *,
    json: Annotated[Path | None, Parameter(help="Write the document there.")] = None,
    only: Annotated[
        str, Parameter(group=_WHAT, help="A family, or groups and names with this in them.")
    ] = "",
    quick: Annotated[
        bool, Parameter(group=_WHAT, negative="", help="Checks of the tree and eight steps.")
    ] = False,
    run: Annotated[
        RunName | None, Parameter(group=_WHAT, help="One question, some minutes.")
    ] = None,
    time_limit: Annotated[float, Parameter(help="Seconds for everything.")] = 560.0,
    seed: Annotated[int | None, Parameter(help="Of all inputs; default: a new one.")] = None,
) -> int:
    """Time."""
    import torch

    name = "quick" if quick else run
    named = None if name is None else named_runs()[name]

    def save(document: dict[str, Any]) -> None:
        if json is not None:
            json.write_text(json_format.dumps(document, indent=1) + "\n")

    document = GpuRun(
        only=named.only if named else (only,) * bool(only),
        time_limit_s=named.seconds if named else time_limit,
        seed=int(time.time()) if seed is None else seed,
        uses_gpu=torch.cuda.is_available(),
        save=save,
        named=named,
    ).execute()
    print(as_table(document))
    rows = document["timings"]
    checks = document.get("checks", {"failed": (), "not_run": (), "why_not_run": None})
    wrong = checks["failed"] or checks["not_run"] or checks["why_not_run"]
    return int(bool(wrong) or any(row["state"] not in FINE for row in rows) or not rows)


main = functools.partial(run_app, app, refused=())

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
