"""Check the installed packages against known vulnerabilities; list the direct dependencies.

The check is pip-audit's, which asks PyPI. Exit code 0: checked, and nothing is known. 1: something
is, and is shown. 3: not checked, with the reason: there is no network, or no pip-audit.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.command_line import make_app, run_app

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
_LISTS = re.findall(
    r"^(?:dependencies|cpu) = \[(.*?)^\]", PROJECT.read_text(), re.MULTILINE | re.DOTALL
)

CLEAN, VULNERABLE, NOT_AUDITED = 0, 1, 3
REASONS = dict(re.findall(r'^    "([\w.-]+)[^"]*",  # (.+)$', "".join(_LISTS), re.MULTILINE))
"""Reasons of the direct dependencies: their comments in pyproject.toml."""
_TIME_LIMIT_S = 300

app = make_app("audit", __doc__ or "")


def direct_dependencies() -> list[str]:
    project = tomllib.loads(PROJECT.read_text())["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["cpu"]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in needed]


def licence(name: str) -> tuple[str, str]:
    """The installed version, and its licence in its own words."""
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        return "not installed", ""
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License")
    ]
    words = metadata.get("License-Expression") or ", ".join(classifiers) or metadata.get("License")
    return metadata["Version"], (words or "unknown").splitlines()[0]


def installed() -> dict[str, str]:
    """Versions by name, as PyPI knows them: torch's 2.13.0+cpu is 2.13.0 there."""
    return {
        found.metadata["Name"].lower().replace("_", "-"): found.version.partition("+")[0]
        for found in distributions()
        if found.metadata["Name"].lower() != "engine-core"
    }


def known_vulnerabilities(command: list[str]) -> list[str] | str:
    """A line for each, or why that could not be found out: a direct dependency that the service
    does not know was not checked. `command`: what runs pip-audit."""
    pins = "\n".join(f"{name}=={version}" for name, version in sorted(installed().items()))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(pins)
        file.flush()
        command = [*command, "-r", file.name, "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S)
            packages = json.loads(done.stdout)["dependencies"]
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        except (ValueError, KeyError):
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"pip-audit ended with exit code {done.returncode}"
    checked = {package["name"] for package in packages if "skip_reason" not in package}
    if missing := sorted({*direct_dependencies()} - checked):
        return f"the service does not answer for {', '.join(missing)}; is PyPI itself reached?"
    if unknown := sorted({*installed()} - checked):
        print(f"\nnot checked, as the service does not know them: {', '.join(unknown)}")
    return [
        f"{package['name']} {package['version']}: {each['id']}, fixed in "
        f"{', '.join(each['fix_versions']) or 'no version yet'}"
        for package in packages
        for each in package.get("vulns", [])
    ]


@app.default
def audit() -> int:
    """Check and list."""
    for name in direct_dependencies():
        version, words = licence(name)
        print(f"{name:<13} {version:<13} {words:.60}\n{'':<13} {REASONS[name]}")
    found = known_vulnerabilities([sys.executable, "-m", "pip_audit"])
    if isinstance(found, str):
        print(f"\nnot audited: {found}")
        return NOT_AUDITED
    print("\naudited:", *(found or ["no known vulnerabilities"]), sep="\n  ")
    return VULNERABLE if found else CLEAN


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
