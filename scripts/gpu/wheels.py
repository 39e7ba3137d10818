"""What the engine imports and a bare GPU machine has not: installed from carried wheels.

Owns the list of those packages, and a temporary folder of them for this process and its children.
Must not know what needs them. Fetching, on a machine with a network: `scripts/fetch_wheels.py`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "wheels"
PACKAGES = {
    "msgspec": "msgspec==0.22.0",
    "zmq": "pyzmq==27.3.0",
    "platformdirs": "platformdirs==4.14.5",
    "gguf": "gguf==0.19.0",
    "cyclopts": "cyclopts==5.4.0",
    "docstring_parser": "docstring-parser==0.18.0",
    "rich_rst": "rich-rst==2.2.0",
}
"""By the module that is imported; the last two are cyclopts' own needs. Nothing that such a machine
has is listed, so that nothing there is replaced."""


class WheelsNotInstalled(Exception):
    """Names what is missing and how to bring it."""


def missing_modules(packages: Mapping[str, str] = PACKAGES) -> list[str]:
    """Those that cannot be imported here."""
    return [module for module in packages if importlib.util.find_spec(module) is None]


@contextlib.contextmanager
def installed_wheels(
    folder: Path = FOLDER, packages: Mapping[str, str] = PACKAGES
) -> Iterator[None]:
    """All of `packages` can be imported inside, here and by child processes that are started inside
    with this environment; what was installed for that is gone afterwards.

    Raises:
        WheelsNotInstalled: a module is missing and the folder has no wheel that fits.
    """
    missing = missing_modules(packages)
    if not missing:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="wheels-") as target:
        _install(folder, [packages[module] for module in missing], target)
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{target}{os.pathsep}{before}" if before else target
        sys.path.insert(0, target)
        importlib.invalidate_caches()
        try:
            still = missing_modules(packages)
            if still:
                raise WheelsNotInstalled(f"the wheels in {folder} have no module {still[0]}")
            yield
        finally:
            sys.path.remove(target)
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def _install(folder: Path, requirements: list[str], target: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-index", "--find-links", str(folder), "--no-deps", "--no-compile"]
    command += ["--no-cache-dir", "--target", target, *requirements]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise WheelsNotInstalled(f"pip cannot be run: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip says nothing"]
        raise WheelsNotInstalled(
            f"{', '.join(requirements)} cannot be installed from {folder}: {lines[-1][:300]}; "
            "run scripts/fetch_wheels.py where there is a network, and bring that folder"
        )
