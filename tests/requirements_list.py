"""Prints every required behaviour, and the tests that prove it."""

import ast
import csv
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

ROOT = Path(__file__).parents[1]
STATES = ("done", "scheduler only", "planned", "not applicable", "open")
_ID = r"S\d{3}(?:-S\d{3})?"
_PROVES = re.compile(rf"\b[Pp]roves ({_ID}(?:(?:, and|,| and) {_ID})*)")
_HELP = """Prints a page from docs/requirements.csv (id, section, name, state, why) and the tests.
A test proves rows by a sentence in its docstring: `Proves S001, S004-S006.`; the docstring of a
module or class speaks for all its tests. A proven row is done, unless the table says "scheduler
only": nothing but the tests of the scheduler reaches it yet. "planned" and "not applicable" are
for rows that no test proves."""

app = App(name="requirements_list", help=_HELP, result_action="return_value")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One required behaviour."""

    id: str
    section: str
    name: str
    state: str
    """Empty, or one of STATES but "done" and "open"."""
    why: str


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """A place in the tests that says that it proves a row."""

    row_id: str
    file: str
    test: str
    """Empty for a whole file."""


def read_rows(path: Path) -> list[Row]:
    """The rows in order. Raises ValueError: an id twice, or a state that does not exist."""
    with path.open(newline="") as file:
        rows = [Row(**fields) for fields in csv.DictReader(file)]
    seen: set[str] = set()
    for row in rows:
        if row.id in seen or not re.fullmatch(r"S\d{3}", row.id):
            raise ValueError(f"{path.name}: id {row.id!r} is there twice or is not S and 3 digits")
        if row.state not in ("", *STATES[1:4]) or bool(row.state) != bool(row.why):
            raise ValueError(
                f"{path.name}: {row.id} has state {row.state!r} and why {row.why!r}; give one of "
                f"{', '.join(STATES[1:4])} with a reason, or leave both empty"
            )
        seen.add(row.id)
    return rows


def ids_proved(docstring: str) -> list[str]:
    """The rows that a docstring says it proves; "S004-S006" stands for three."""
    ids: list[str] = []
    for claim in _PROVES.findall(" ".join(docstring.split())):
        for part in re.findall(_ID, claim):
            first, _, last = part.partition("-")
            stop = int((last or first)[1:]) + 1
            ids += [f"S{number:03}" for number in range(int(first[1:]), stop)]
    return ids


def proofs_in(path: Path, root: Path) -> tuple[list[Proof], list[str]]:
    """What a test file proves, and what is wrong with what it says."""
    proofs, problems = [], []
    file = path.relative_to(root).as_posix()
    for name, docstring in _docstrings(ast.parse(path.read_text())):
        ids = ids_proved(docstring)
        is_test = not name or name.split("::")[-1].startswith(("test_", "Test"))
        if ids and not (is_test and path.name.startswith("test_")):
            problems.append(
                f"{file}::{name} proves {', '.join(ids)}, but pytest does not run it by that name; "
                "say it in the docstring of a test or of a test file"
            )
        else:
            proofs += [Proof(row_id, file, name) for row_id in ids]
    return proofs, problems


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str = ""
) -> Iterator[tuple[str, str]]:
    docstring = ast.get_docstring(node)
    if docstring:
        yield name, docstring
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}::{child.name}" if name else child.name)


def collect(root: Path) -> tuple[list[Row], dict[str, list[Proof]], list[str]]:
    """Rows, proofs by row, and problems."""
    rows = read_rows(root / "docs" / "requirements.csv")
    proofs: dict[str, list[Proof]] = {row.id: [] for row in rows}
    problems: list[str] = []
    for path in sorted((root / "tests").rglob("*.py")):
        found, wrong = proofs_in(path, root)
        problems += wrong
        for proof in found:
            if proof.row_id in proofs:
                proofs[proof.row_id].append(proof)
            else:
                problems.append(
                    f"{proof.file}::{proof.test} proves {proof.row_id}, which docs/requirements.csv"
                    " does not have; correct the id"
                )
    return rows, proofs, problems


def state_of(row: Row, proofs: list[Proof]) -> str:
    """A proof outweighs "planned" and "not applicable"; without one nothing is reached at all."""
    if proofs:
        return row.state if row.state == "scheduler only" else "done"
    return "open" if row.state in ("", "scheduler only") else row.state


def page(rows: list[Row], proofs: dict[str, list[Proof]]) -> str:
    """All rows by section, in Markdown."""
    states = [state_of(row, proofs[row.id]) for row in rows]
    lines = [
        "# Required behaviour",
        "",
        "Names are those of the scheduler designs that the rows come from; what counts is the",
        "behaviour. A row is done if tests prove it, and scheduler only if tests prove it and",
        "nothing but the scheduler's tests reaches it yet.",
        "",
        "| state | rows |",
        "|---|---|",
        *[f"| {state} | {states.count(state)} |" for state in STATES],
        f"| all | {len(rows)} |",
    ]
    section = None
    for row, state in zip(rows, states, strict=True):
        if row.section != section:
            section = row.section
            lines += ["", f"## {section}", "", "| id | what | state | |", "|---|---|---|---|"]
        is_reached = state == "done" and row.state == "planned"
        why = [] if is_reached or not row.why else [_cell(row.why)]
        where = "; ".join(why + _places(proofs[row.id]))
        lines.append(f"| {row.id} | {_cell(row.name)} | {state} | {where} |")
    return "\n".join(lines) + "\n"


def _places(proofs: list[Proof]) -> list[str]:
    by_file: dict[str, list[str]] = {}
    for proof in proofs:
        tests = by_file.setdefault(proof.file.removeprefix("tests/"), [])
        if proof.test and proof.test not in tests:
            tests.append(proof.test)
    return [
        f"{file}: {', '.join(tests)}" if tests else f"{file} (all of it)"
        for file, tests in by_file.items()
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


@app.default
def main(
    *,
    check: Annotated[
        bool, Parameter(help="Print problems alone; a row without a proof is one.", negative="")
    ] = False,
    root: Annotated[Path, Parameter(show=False)] = ROOT,
) -> int:
    """Returns the exit status: 1 if something is wrong with the table or a docstring."""
    rows, proofs, problems = collect(root)
    if check:
        problems += [
            f"{row.id} is proven by no test; write `Proves {row.id}.` in one that does"
            for row in rows
            if state_of(row, proofs[row.id]) == "open"
        ]
    else:
        print(page(rows, proofs), end="")
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(app())
