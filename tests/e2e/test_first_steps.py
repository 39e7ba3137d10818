"""The pages of the first steps, typed as they stand: each `$ ` command and each block of Python, in
order, in one shell. Blocks without `$ ` need more than a test has; test_doc_blocks checks them."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine_core.distributed.rendezvous import free_port

START = Path(__file__).parents[2] / "docs" / "start"
_FENCE = re.compile(r"(?ms)^```(console|python)\n(.*?)^```$")
_BEGIN = """\
set -em
curl() { command curl -sS --fail --retry 60 --retry-delay 1 --retry-connrefused "$@"; }
trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
"""
"""A user sees when the server is ready, and types on then."""

pytestmark = pytest.mark.slow


def script(page: Path, port: int) -> str:
    parts = [_BEGIN]
    for language, text in _FENCE.findall(page.read_text()):
        if language == "console" and text.startswith("$ "):
            parts.append(re.sub(r"(?m)^\$ ", "", text))
        elif language == "python" and all(map(find_spec, re.findall(r"(?m)^from (\w+)", text))):
            parts.append(f"{sys.executable} - <<'END'\n{text}END\n")
    typed = "".join(parts).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    return re.sub(r"(engine-core serve [\w-]+)", rf"\1 --port {port}", typed)


@pytest.mark.parametrize("page", ["first_answer.md", "first_server.md"])
def test_what_the_page_says_works_as_typed(page, smollm2, tmp_path):
    text = script(START / page, free_port("127.0.0.1"))
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": programs, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert len(done.stdout.split()) > 60, done.stdout
