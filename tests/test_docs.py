"""The pages of the project: links lead somewhere, raw figures belong to a page, all is readable."""

import re
from functools import cache
from pathlib import Path

import pytest

from scripts.docs_site import REFERENCE

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
SHORT = [page for page in PAGES if page.name != "README.md"]
READ = ("start", "guides", "concepts", "reference", "internals")
IN_FOLDERS = sorted(page for page in PAGES if page.parent.name in READ)
FOLDERS = ("engine_core", "frontend", "kernels", "protocol", "scripts", "tests")
MADE = {ROOT / "docs/reference" / f"{name}.md" for name in REFERENCE}
_NAMING = {".py", ".toml", ".js", ".html", ".cpp", ".h", ".yml", ".yaml", ".service"}
_PAGE = re.compile(r"(?<![\w/])docs/[\w/-]+\.md\b")
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


def test_a_name_that_a_page_puts_beside_its_file_stands_there():
    """`Name` (`file.py`) and `file.py: Name`."""
    suffixes = r"\.(?:py|h|cpp|js)"
    beside = re.compile(rf"`([\w.]+)` \(`([\w/]+{suffixes})`\)|`([\w/]+{suffixes}): ([\w.]+)`")
    pages = "".join(page.read_text() for page in PAGES)
    pairs = {(a or d, b or c) for a, b, c, d in beside.findall(pages)}
    assert len(pairs) > 20
    paths = [path for name in FOLDERS for path in (ROOT / name).rglob("*.*")]
    wrong = [
        (name, file)
        for name, file in pairs
        if not any(
            re.search(rf"\b{name.rpartition('.')[2]}\b", path.read_text())
            for path in paths
            if f"/{path.relative_to(ROOT)}".endswith(f"/{file}")
        )
    ]
    assert not wrong


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


def test_every_page_that_the_code_names_is_there():
    """Messages, help texts and comments send their readers to pages, which are moved and split."""
    folders = [ROOT / name for name in (*FOLDERS, "docs/deployment", "docs/monitoring")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in _NAMING]
    named = {name for path in files for name in _PAGE.findall(path.read_text())}
    assert len(named) > 10
    assert not [name for name in named if not (ROOT / name).exists() and ROOT / name not in MADE]


def test_every_raw_figure_belongs_to_a_page():
    raw = {path.name for path in (ROOT / "docs" / "benchmarks").iterdir()}
    named = "".join(page.read_text() for page in PAGES)
    assert not {name for name in raw if f"benchmarks/{name}" not in named}


def blocks_of(page: Path) -> list[str]:
    """Headings, paragraphs, items of lists, tables, codes (emptied) of a page, in order."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "\n```\n", page.read_text())
    text = re.sub(r"(?m)^#.*$", r"\n\g<0>\n", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )", text)
    return [block.strip() for block in blocks if block.strip()]


@pytest.mark.parametrize("page", IN_FOLDERS, ids=[page.name for page in IN_FOLDERS])
def test_a_page_begins_with_what_it_is_for_and_ends_with_what_is_next(page):
    title, purpose, *_, last = blocks_of(page)
    assert title.startswith("# ")
    assert re.match(r"[A-Z`*]", purpose) and len(purpose.split()) <= 90, "a sentence or two"
    assert re.match(r"Next: \[.+\]\(.+\)", last)


@pytest.mark.parametrize("page", SHORT, ids=[page.name for page in SHORT])
def test_a_page_is_short_and_has_no_paragraph_that_is_a_wall(page):
    assert len(page.read_text().splitlines()) <= 250
    blocks = [block for block in blocks_of(page) if not block.startswith("|")]
    long = {" ".join(block.split()[:6]): len(block.split()) for block in blocks}
    assert not {begin: words for begin, words in long.items() if words > 90}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_a_table_has_headings(page):
    heads = re.findall(r"(?m)^(\|.*\|)\n\|[-:| ]+\|$", page.read_text())
    assert not [head for head in heads if head.strip("| ") == ""]
