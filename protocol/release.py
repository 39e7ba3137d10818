"""The release of this program, for `--version`."""

import contextlib
import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

_HERE = Path(__file__).parent


def release_line() -> str:
    """For `--version`: `0.1.0`, or `0.1.0 (commit 0aef753a)` where the commit is known."""
    try:
        version = distribution("engine-core").version
    except PackageNotFoundError:
        version = "not installed"
    commit = _commit()
    return f"{version} (commit {commit})" if commit else version


def _commit() -> str | None:
    """The commit that scripts/wheel.py, git or pip has noted."""
    with contextlib.suppress(OSError):
        return (_HERE / "commit.txt").read_text().strip()
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (_HERE.parent / ".git").exists():
            git = ["git", "-C", str(_HERE.parent), "rev-parse", "--short=8", "HEAD"]
            return subprocess.check_output(git, text=True, stderr=subprocess.DEVNULL).strip()
    with contextlib.suppress(PackageNotFoundError, KeyError):
        noted = distribution("engine-core").read_text("direct_url.json")
        return str(json.loads(noted or "{}")["vcs_info"]["commit_id"])[:8]
    return None
