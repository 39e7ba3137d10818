"""Every script answers --help at once: it neither does its work nor imports torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
NO_TORCH = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "triton", "transformers"):
            raise ImportError(f"{name} is not needed for --help")
sys.meta_path.insert(0, Refused())
"""


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.glob("*.py")))
def test_help_is_printed_without_torch_and_without_side_effects(name, tmp_path):
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(NO_TORCH)
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, SCRIPTS / name, "--help"],
        cwd=tmp_path / "empty",
        env={**os.environ, "PYTHONPATH": str(tmp_path / "path")},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "empty").iterdir())
