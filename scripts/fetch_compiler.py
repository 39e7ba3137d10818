"""Fetches the GPU machine's triton for the compile proof, and prints its folder on stdout.

    PYTHONPATH=$(python scripts/fetch_compiler.py) python scripts/compile_kernels.py

The kernels are judged by what that version makes of them, whatever triton is installed: another one
allots registers differently. It goes to .cache/ of the project, once, and is not installed. Exit
code 1 with one line on stderr when it cannot be had.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "3.6.0"
FOLDER = Path(__file__).resolve().parent.parent / ".cache" / f"triton-{VERSION}"


class CompilerNotFetched(Exception):
    """Says why, and what to do."""


def fetch_compiler(folder: Path = FOLDER) -> Path:
    """The folder for PYTHONPATH; fetched with this Python's pip if it is not there.

    Raises:
        CompilerNotFetched: no pip, no network, or no wheel for this machine.
    """
    if _is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # beside its place, so that a fetch that is broken off or runs twice leaves nothing half done
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as temporary:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]
        command += ["--quiet", "--no-deps", "--target", temporary, f"triton=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or not _is_complete(Path(temporary)):
            reason = (done.stderr.strip().splitlines() or ["pip left no compiler"])[-1]
            raise CompilerNotFetched(
                f"triton {VERSION} cannot be fetched: {reason}; with a network run "
                f"{' '.join(command[:3])} install --no-deps --target {folder} triton=={VERSION}"
            )
        shutil.rmtree(folder, ignore_errors=True)
        Path(temporary).chmod(0o755)
        try:
            Path(temporary).rename(folder)
        except OSError:
            if not _is_complete(folder):  # another process was faster
                raise
        else:
            Path(temporary).mkdir()  # for the context manager to remove
    return folder


def compiler_environment(folder: Path) -> dict[str, str]:
    """The environment of a process that compiles with that triton."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{path}" if path else str(folder)
    return environment


def _is_complete(folder: Path) -> bool:
    tools = folder / "triton" / "backends" / "nvidia" / "bin"
    metadata = folder / f"triton-{VERSION}.dist-info" / "METADATA"
    return metadata.is_file() and all((tools / name).is_file() for name in ("ptxas", "cuobjdump"))


def main() -> int:
    try:
        print(fetch_compiler())
    except CompilerNotFetched as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
