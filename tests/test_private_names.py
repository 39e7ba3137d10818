"""Tests ask what a user or a neighbour may ask: private members are read in few places."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent
MOST = 100
"""Fewer where a public question has come to be; never more."""
FOREIGN = {"os", "asyncio", "gguf", "interpreter"}
"""Modules of others, the last Triton's, whose names begin as they like."""


def private_reads(path: Path) -> list[str]:
    """`a._b` of anything but the object itself, and imports of such names, each with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=value, attr=name):
                own = isinstance(value, ast.Name) and value.id in {"self", "cls", *FOREIGN}
                names = [] if own or "super()" in ast.unparse(value) else [name]
            case ast.ImportFrom():
                names = [alias.name for alias in node.names]
            case _:
                continue
        place = f"{path.relative_to(ROOT)}:{node.lineno}"
        found += [f"{place} {name}" for name in names if name[0] == "_" and name[:2] != "__"]
    return found


def test_private_members_are_read_in_few_places():
    found = [each for path in sorted(ROOT.rglob("*.py")) for each in private_reads(path)]
    assert len(found) <= MOST, "\n".join(found)
