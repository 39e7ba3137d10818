"""What a machine with a GPU and without a network needs beside the tree: `python3 -m
scripts.gpu.carry [3.12]` fills a folder with packages for that Python, and the commit's name."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CARRIED = ROOT / ".cache" / "gpu_run"
_COMMIT = "commit"
_PACKAGES = (
    *("msgspec", "pyzmq", "platformdirs", "gguf", "cyclopts", "docstring-parser", "rich-rst"),
    *("pytest", "pluggy", "iniconfig", "packaging", "pygments", "pytest-xdist", "execnet"),
    *("pytest-timeout", "pytest-asyncio", "typing-extensions", "hypothesis", "sortedcontainers"),
)
"""What is imported there, and torch, triton, transformers, numpy do not bring along."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux2014_x86_64")


def commit_of(root: Path) -> str | None:
    """The tree's commit, "+" behind it if files differ; of a copy without git what `main` wrote
    down. None: neither is known."""
    try:
        name = _git(root, "rev-parse", "HEAD")
        return name + "+" * bool(_git(root, "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        written = root / CARRIED.relative_to(ROOT) / _COMMIT
        return written.read_text().strip() if written.is_file() else None


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main(arguments: list[str]) -> int:
    """Returns pip's exit code."""
    version = arguments[0] if arguments else "3.12"
    CARRIED.mkdir(parents=True, exist_ok=True)
    (CARRIED / _COMMIT).write_text(f"{commit_of(ROOT)}\n")
    command = [sys.executable, "-m", "pip", "install", "--target", str(CARRIED), "--upgrade"]
    command += ["--no-deps", "--no-compile", "--only-binary=:all:", "--python-version", version]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    return subprocess.run([*command, *_PACKAGES], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
