"""Builds the documentation as a site: `python scripts/docs_site.py [serve]`; needs the
extra `docs`.

Pages of docs/ are copied to build/docs, those of the reference are made there from the code, and
Zensical builds build/site of them, strictly: a dead link or anchor fails.
"""

import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reference.command_lines import engine_client_page, engine_core_page  # noqa: E402
from scripts.reference.http_api import http_page  # noqa: E402
from scripts.reference.metrics import metrics_page  # noqa: E402
from scripts.reference.python_api import errors_page, python_page  # noqa: E402

DOCS, BUILD = ROOT / "docs", ROOT / "build" / "docs"
SECTIONS = {
    "start": "Start", "guides": "Guides", "concepts": "Concepts", "reference": "Reference",
    "internals": "Internals",
}  # fmt: skip
REFERENCE = {
    "engine-core": engine_core_page,
    "engine-client": engine_client_page,
    "python": python_page,
    "http": http_page,
    "metric_names": metrics_page,
    "errors": errors_page,
}
_OF_THE_SITE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "internals/contributing.md",
}
_LINK = re.compile(r"\]\(([^()\s#]+)(#[^()\s]*)?\)")
_OF_TESTS = re.compile(r'(?m)^( *```\w+) no-test="[^"\n]*"$')


def write_sources() -> None:
    """All pages, in build/docs/pages, and the configuration beside them."""
    pages = BUILD / "pages"
    shutil.rmtree(BUILD, ignore_errors=True)
    shutil.copytree(DOCS, pages, ignore=shutil.ignore_patterns("mkdocs.yml"))
    for name, make in REFERENCE.items():
        (pages / "reference" / f"{name}.md").write_text(make())
    for source, target in _OF_THE_SITE.items():
        if target != "index.md":
            (pages / target).write_text((ROOT / source).read_text())
    came_from = {target: source for source, target in _OF_THE_SITE.items() if target != "index.md"}
    for page in pages.rglob("*.md"):
        name = page.relative_to(pages).as_posix()
        source = ROOT / came_from.get(name, f"docs/{name}")
        link = functools.partial(_link, source=source, page=page, pages=pages)
        page.write_text(_LINK.sub(link, _OF_TESTS.sub(r"\1", page.read_text())))
    configuration = (DOCS / "mkdocs.yml").read_text().replace("ROOT", str(ROOT))
    (BUILD / "mkdocs.yml").write_text(configuration + _navigation(pages))


def _link(found: re.Match[str], source: Path, page: Path, pages: Path) -> str:
    """A link to a file outside docs/ leads to a copy of it."""
    target = (source.parent / found[1]).resolve()
    if "://" in found[1] or not target.is_file():
        return found[0]
    name = target.relative_to(ROOT).as_posix()
    if target.is_relative_to(DOCS):
        copy = pages / target.relative_to(DOCS)
    else:
        copy = pages / _OF_THE_SITE.get(name, f"files/{name}")
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(target, copy)
    return f"]({os.path.relpath(copy, page.parent)}{found[2] or ''})"


def _navigation(pages: Path) -> str:
    """Each folder's pages as the first page names them, then the others. Guides are many: they
    stand below the words of that page's rows."""
    rows = re.findall(r"(?m)^\| ([^|]*) \| (.*) \|$", (DOCS / "index.md").read_text())
    order = re.findall(r"\]\(([\w/-]+\.md)", "".join(row for _, row in rows))
    groups = {page: to for to, row in rows for page in re.findall(r"\]\((guides/\w+\.md)", row)}
    lines = ["nav:", "  - index.md"]
    for folder, title in SECTIONS.items():
        names = sorted(each.relative_to(pages).as_posix() for each in pages.glob(f"{folder}/*.md"))
        names.sort(key=lambda name: order.index(name) if name in order else len(order))
        lines += [f"  - {title}:"] if names else []
        for group, members in itertools.groupby(names, lambda name: groups.get(name, "")):
            lines += [f"    - {group[0].upper()}{group[1:]}:"] if group else []
            lines += [f"    {'  ' * bool(group)}- {name}" for name in members]
    others = sorted(each.name for each in pages.glob("*.md") if each.name != "index.md")
    return "\n".join([*lines, *(f"  - {name}" for name in others)]) + "\n"


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case []:
            command = ["build", "--strict"]
        case ["serve"]:
            command = ["serve"]
        case ["--help" | "-h"]:
            print(__doc__)
            return 0
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    write_sources()
    configuration = ["-f", str(BUILD / "mkdocs.yml")]
    return subprocess.call([sys.executable, "-m", "zensical", *command, *configuration])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
