"""Runs all checks and timings of a GPU machine, and writes one JSON document.

    python3 scripts/gpu_run.py --json run.json [--wheels DIR] [--only TEXT]

Needs torch, triton, transformers and numpy. What else is missing comes from a folder of wheels, by
default the one that `python3 -m scripts.gpu.carry` fills, unpacked to a temporary folder. The
document is rewritten as results come; what the time limit cut off stands in it as "not run". Exit
code 0, 1 if something failed or did not run, 2 for wrong options, 130 after Ctrl-C.
"""

import argparse
import contextlib
import json as json_format
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpu.carry import CARRIED, commit_of
from scripts.gpu.processes import CHECKS_AT_ONCE, ROOT, check_file, run_worker, unpacked_wheels
from scripts.gpu.timing import FAMILIES, Instruction, Row, load_family

FILE_LIMIT_S = 180.0
"""A file of checks or a family of timings that takes longer hangs."""
SHARE_OF_CHECKS = 0.55
"""Of the time limit, after which no check begins or goes on: the rest is for timings."""
FIRST = ("whole_models", "batch_invariance")
"""They take longest: begun last, everything would wait for them."""
ALONE = "daemon"
"""In the names of files that run when all others have ended: a daemon measures the device's memory,
and must not take what its neighbours do there for its own."""
FINE = ("passed", "timed", "measured")


def find_checks(only: str, *, uses_gpu: bool) -> list[str]:
    """Files of tests in the order in which they begin; a GPU runs the interpreter's too."""
    folders = [ROOT / "tests" / "gpu"] + [ROOT / "tests" / "kernels" / "triton"] * uses_gpu
    files = [str(p.relative_to(ROOT)) for f in folders for p in sorted(f.glob("test_*.py"))]
    files.sort(key=lambda file: not any(name in file for name in FIRST))
    return [file for file in files if only in file]


class GpuRun:
    """A run of everything, phase by phase; `save` gets the document after each. Without a GPU all
    checks are skipped, and nothing is timed."""

    def __init__(
        self,
        *,
        only: str,
        time_limit_s: float,
        seed: int,
        uses_gpu: bool,
        save: Callable[[dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._only, self._seed, self._uses_gpu = only, seed, uses_gpu
        self._save, self._clock = save, clock
        self._start_s = clock()
        self._limit_s = time_limit_s
        self.document: dict[str, Any] = {"commit": commit_of(ROOT), "seed": seed}
        self.document |= {"device": None, "ceilings": None}
        self.document |= {"checks": [], "timings": []}

    def execute(self) -> dict[str, Any]:
        """All phases. Returns the document."""
        self._measure_ceilings()
        files = find_checks(self._only, uses_gpu=self._uses_gpu)
        alone = [file for file in files if ALONE in file]
        with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
            for rows in pool.map(self._check, [file for file in files if file not in alone]):
                self._add("checks", rows)
        for file in alone:
            self._add("checks", self._check(file))
        for family in FAMILIES:
            self._add("timings", self._time(family))
        self.document["seconds"] = round(self._clock() - self._start_s, 1)
        self._save(self.document)
        return self.document

    def _seconds_left(self, limit_s: float) -> float:
        return min(self._start_s + limit_s - self._clock(), FILE_LIMIT_S)

    def _measure_ceilings(self) -> None:
        if not self._uses_gpu:
            self.document["why_no_ceilings"] = "torch sees no GPU"
            return
        seconds = self._seconds_left(self._limit_s)
        rows, lost = run_worker(Instruction("", "", seconds, self._seed))
        if rows:
            self.document |= rows[0]
        else:
            self.document["why_no_ceilings"] = (lost or {}).get("why", "no result")

    def _check(self, file: str) -> list[Row]:
        seconds = self._seconds_left(SHARE_OF_CHECKS * self._limit_s)
        if seconds <= 0:
            return [{"file": file, "name": file, "state": "not run", "why": "time limit"}]
        return check_file(file, seconds, self._seed, uses_gpu=self._uses_gpu)

    def _time(self, family: str) -> list[Row]:
        only = "" if self._only in family else self._only
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
            while (seconds := self._seconds_left(self._limit_s)) > 0:
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
        return [row | {"device": device} for row in rows]

    def _add(self, kind: str, rows: list[Row]) -> None:
        self.document[kind] += rows
        self._save(self.document)


def _lost_rows(group: str, names: list[str], known: set[str], lost: Row) -> list[Row]:
    return [{"group": group, "name": name} | lost for name in names if name not in known]


def as_table(document: dict[str, Any]) -> str:
    """What passed as a count, what did not by name, then timings and figures."""
    checks, timings = document["checks"], document["timings"]
    if document["ceilings"] is None:
        lines = [f"no ceilings: {document['why_no_ceilings']}"]
    else:
        copy, product = document["ceilings"].values()
        lines = [
            f"{document['device']['name']}: copy {copy / 1e12:.2f} TB/s, "
            f"bf16 product {product / 1e12:.0f} TFLOP/s; commit {document['commit']}"
        ]
    states = Counter(row["state"] for row in checks)
    lines.append("checks: " + ", ".join(f"{number} {state}" for state, number in states.items()))
    wrong = [row for row in checks + timings if row["state"] not in (*FINE, "skipped")]
    lines += [f"  {row['state']}: {row['name']}: {row.get('why', '')}" for row in wrong]
    timed = [row for row in timings if row["state"] == "timed"]
    width = max((len(row["name"]) for row in timed), default=0)
    if timed:
        heads = ("us", "again", "graph", "floor", "of it", "GB/s", "TFLOP/s")
        lines.append(" " * width + "".join(f"{head:>10}" for head in heads))
    lines += [_timing_line(row, width) for row in timed]
    for row in timings:
        if row["state"] == "measured":
            numbers = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
            lines.append(f"{row['name']}: {numbers}")
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
    )
    return f"{row['name']:{width}}" + "".join(f"{cell:>10}" for cell in cells)


def main(arguments: list[str]) -> int:
    """Run one command line. Returns the exit code."""
    with contextlib.ExitStack() as wheels:
        # read before the library of command lines, which may be among them
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--wheels", nargs="?", type=Path)
        folder = parser.parse_known_args(arguments)[0].wheels
        if folder is None and any(CARRIED.glob("*.whl")):
            folder = CARRIED
        if folder is not None:
            try:
                wheels.enter_context(unpacked_wheels(folder))
            except OSError as error:
                print(f"gpu_run: {error}", file=sys.stderr)
                return 2
        from cyclopts import Parameter

        from scripts.command_line import make_app, run_app

        app = make_app("gpu_run", __doc__)

        @app.default
        def gpu_run(
            *,
            json: Annotated[Path | None, Parameter(help="Write the document there.")] = None,
            wheels: Annotated[Path | None, Parameter(help="Folder of missing packages.")] = None,
            only: Annotated[
                str,
                Parameter(help="Files of checks, groups and names of timings with this in them."),
            ] = "",
            time_limit: Annotated[float, Parameter(help="Seconds for everything.")] = 560.0,
            seed: Annotated[
                int | None, Parameter(help="Of all inputs; default: a new one.")
            ] = None,
        ) -> int:
            """Check and time."""
            import torch

            def save(document: dict[str, Any]) -> None:
                if json is not None:
                    json.write_text(json_format.dumps(document, indent=1) + "\n")

            run = GpuRun(
                only=only,
                time_limit_s=time_limit,
                seed=int(time.time()) if seed is None else seed,
                uses_gpu=torch.cuda.is_available(),
                save=save,
            )
            document = run.execute()
            print(as_table(document))
            rows = document["checks"] + document["timings"]
            return int(any(row["state"] not in FINE for row in rows) or not rows)

        return run_app(app, arguments, refused=())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
