"""Docstrings stand alone: an editor shows each without its neighbours."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "frontend", "engine_core", "kernels", "scripts")
OPENINGS = re.compile(
    "(After|Also|And|As|At|Before|Behind|Below|Beside|Between|By|For|From|In|Likewise|Not|Of|On|Or"
    r"|Since|So|Than|That|To|Until|What|Where|Which|While|Who|Whose|With|Without)\b"
)
"""First words of phrases that go on with what stands above them."""
LONGEST = 60
"""Characters of such a phrase; a longer one says what it is about."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Lines and texts of all, of variables and fields too."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, " ".join(text.split())


def leans(text: str) -> bool:
    return len(text) <= LONGEST and OPENINGS.match(text) is not None


def test_a_phrase_without_its_subject_is_found():
    source = 'a = 1\n"""Of it."""\ndef f():\n    """The one."""\nb = 2\n"""Likewise."""\n'
    assert sorted(line for line, text in docstrings(source) if leans(text)) == [2, 6]
    assert not leans("Of a beam: the sum of its tokens' log-probabilities; with the last output.")


def test_docstrings_stand_alone():
    found = []
    for path in sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        lines = docstrings(path.read_text())
        found += [f"{file}:{line}: {text}" for line, text in lines if leans(text)]
    assert not found, "say what it is of, in words of its own: " + "; ".join(found)
