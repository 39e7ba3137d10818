"""Writes the list of files into docs/architecture.md: the first sentence of each docstring.

python scripts/file_index.py           # rewrite the list
python scripts/file_index.py --check   # fail if it is out of date
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
FOLDERS = ("protocol", "frontend", "engine_core", "kernels", "scripts")
START, STOP = "<!-- files: start -->", "<!-- files: stop -->"


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").strip()


def file_list() -> str:
    """Markdown: a section a folder, a row a file."""
    lines = []
    for top in FOLDERS:
        folders = sorted({path.parent for path in (ROOT / top).rglob("*.py")})
        for folder in folders:
            lines += [f"\n### {folder.relative_to(ROOT)}/", "| file | |", "|---|---|"]
            lines += [
                f"| `{path.name}` | {first_line(path)} |" for path in sorted(folder.glob("*.py"))
            ]
    return "\n".join(lines) + "\n"


def with_list(page: str) -> str:
    """The page with the list as it should be."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(STOP)
    return f"{before}{START}\n{file_list()}{STOP}{after}"


def main() -> int:
    page = PAGE.read_text()
    wanted = with_list(page)
    if "--check" in sys.argv:
        if page != wanted:
            print("docs/architecture.md is out of date; run scripts/file_index.py")
        return int(page != wanted)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
