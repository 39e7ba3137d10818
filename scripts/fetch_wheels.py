"""Fetches what the engine needs and a GPU machine has not, as wheels, and prints their folder.

    python scripts/fetch_wheels.py

They are for CPython 3.12 on Linux x86-64, whatever runs this; they go to .cache/wheels of the
project, once, and are not installed: `scripts/gpu_suite.py` does that where it runs. Exit code 1
with one line on stderr when they cannot be had.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

# `python scripts/fetch_wheels.py` puts only this folder on the path
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.gpu.wheels import FOLDER, PACKAGES

PYTHON_VERSION = "3.12"
GLIBC_MINORS = (28, 27, 26, 24, 17)
"""Of the manylinux tags that wheels are published under; pip matches each exactly."""


class WheelsNotFetched(Exception):
    """Says why."""


def fetch_wheels(folder: Path = FOLDER, requirements: Iterable[str] = PACKAGES.values()) -> Path:
    """The folder with exactly these wheels; fetched with this Python's pip if they are not there.

    Raises:
        WheelsNotFetched: no pip, no network, or no wheel for that machine.
    """
    wanted = list(requirements)
    if _holds(folder, wanted):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside its place, so that a fetch that is broken off leaves nothing half done
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as temporary:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
        command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", temporary]
        command += ["--python-version", PYTHON_VERSION, "--implementation", "cp"]
        for minor in GLIBC_MINORS:
            command += ["--platform", f"manylinux_2_{minor}_x86_64"]
        command += ["--platform", "manylinux2014_x86_64", *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not _holds(Path(temporary), wanted):
            reason = (done.stderr.strip().splitlines() or ["pip left no wheels"])[-1]
            raise WheelsNotFetched(f"the wheels cannot be fetched: {reason}; try with a network")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for wheel in Path(temporary).glob("*.whl"):
            wheel.rename(folder / wheel.name)
    return folder


def _holds(folder: Path, requirements: list[str]) -> bool:
    """Whether the folder has one wheel of each, of that very version, and nothing else."""
    names = {tuple(path.name.split("-")[:2]) for path in folder.glob("*")}
    wanted = {tuple(text.replace("-", "_").split("==")) for text in requirements}
    return names == wanted


def main() -> int:
    try:
        print(fetch_wheels())
    except WheelsNotFetched as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
