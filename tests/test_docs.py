"""The pages of the project: links lead somewhere, raw figures belong to a page, tables fit."""

import re
from functools import cache
from pathlib import Path

import pytest

from scripts.docs_site import REFERENCE

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
FOLDERS = ("engine_core", "frontend", "kernels", "protocol", "scripts", "tests")
MADE = {ROOT / "docs/reference" / f"{name}.md" for name in REFERENCE}
_CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_PYTHON = re.compile(r"(?<![*\w/{}.-])[\w./]+\.py\b")
_OF_OTHERS = {"convert_lora_to_gguf.py"}


def links_of(page: Path) -> list[str]:
    return _LINK.findall(_CODE.sub("", page.read_text()))


@cache
def anchors_of(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def files_of_ours() -> str:
    paths = (path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
    return "".join(f"/{path.relative_to(ROOT)}\n" for path in paths)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_files_of_ours_that_a_page_names_are_there(page):
    files = files_of_ours()
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if " " not in span]
    named = {name for span in spans for name in _PYTHON.findall(span)} - _OF_OTHERS
    assert not [name for name in named if f"/{name}\n" not in files]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    dead = []
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" not in link and not (
            target in MADE or (target.exists() and (not anchor or anchor in anchors_of(target)))
        ):
            dead.append(link)
    assert not dead


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_cell_of_a_table_is_read_at_a_glance(page):
    rows = re.findall(r"^\|(.*)\|$", page.read_text(), re.M)
    cells = [cell.strip() for row in rows for cell in row.split("|")]
    assert not [cell for cell in cells if len(cell) > 300]


def test_every_raw_figure_belongs_to_a_page():
    raw = {path.name for path in (ROOT / "docs" / "benchmarks").iterdir()}
    named = "".join(page.read_text() for page in PAGES)
    assert not {name for name in raw if f"benchmarks/{name}" not in named}


def test_the_page_of_figures_is_short():
    assert len((ROOT / "docs" / "benchmarks.md").read_text().splitlines()) <= 250
