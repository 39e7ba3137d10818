"""The spine in docs/internals/spine.md: files to read first, and what they import."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "frontend", "engine_core", "kernels")
MOST_FILES, MOST_LINES, MOST_IMPORTED = 60, 12_000, 60
"""Whoever reads the spine reads the system: none may grow."""


def spine(page: str) -> list[Path]:
    """The files of the page's list: folders at the margin, files behind spaces."""
    listed = page.partition("## The spine")[2].partition("```text\n")[2].partition("```")[0]
    files, folder = [], ROOT
    for line in listed.splitlines():
        if line.startswith(" "):
            files.append(folder / line.split()[0])
        else:
            folder = ROOT / line.partition(":")[0]
    return files


def imported(path: Path) -> Iterator[Path]:
    """Files of the project that a file imports, wherever in it; names that a package hands on are
    of the file that defines them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGES):
            for name in node.names:
                found = _file(f"{node.module}.{name.name}") or _defining(node.module, name.name)
                if found is not None:
                    yield found


def _file(module: str | None) -> Path | None:
    place = ROOT / (module or "").replace(".", "/")
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _defining(module: str | None, name: str) -> Path | None:
    file = _file(module)
    if file is not None and file.name == "__init__.py":
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and name in [each.name for each in node.names]:
                return _file(node.module)
    return file


def main() -> int:
    """Prints the counts. Returns 1 if a file is missing, or a count above its limit."""
    files = spine((ROOT / "docs/internals/spine.md").read_text())
    missing = [file for file in files if not file.is_file()]
    there = [file for file in files if file.is_file()]
    num_lines = sum(len(file.read_text().splitlines()) for file in there)
    outside = {other for file in there for other in imported(file)} - {*there}
    print(f"spine: {len(files)} files, {num_lines} lines, {len(outside)} other files imported")
    for file in missing:
        print(f"docs/internals/spine.md lists {file.relative_to(ROOT)}, which is not there")
    counts = (len(files), num_lines, len(outside))
    limits = (MOST_FILES, MOST_LINES, MOST_IMPORTED)
    if too_many := [pair for pair in zip(counts, limits, strict=True) if pair[0] > pair[1]]:
        print(*(f"the spine has {count}, the limit is {limit}" for count, limit in too_many))
    if not files:
        print("docs/internals/spine.md lists no file behind `## The spine` and ```text")
    return int(bool(missing or too_many or not files))


if __name__ == "__main__":
    sys.exit(main())
