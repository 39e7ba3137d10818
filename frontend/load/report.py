"""Reports of measurements: machine and commit, a table of latencies for people, one JSON document
for programs.
"""

import contextlib
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from protocol.release import release_line

_ROOT = Path(__file__).parents[2]
_usable_cores = getattr(os, "sched_getaffinity", None)  # of Linux
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def describe_run() -> dict[str, Any]:
    """Date, commit, machine and versions of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": {
            "processor": _processor(),
            "cores": len(_usable_cores(0)) if _usable_cores else os.cpu_count(),
            "memory_bytes": _memory_bytes(),
        },
        "versions": {
            "python": platform.python_version(),
            "engine-core": release_line(),
            **{name: _version(name) for name in ("torch", "pyzmq", "msgspec")},
        },
    }


def latency_lines(
    figures: Mapping[str, Mapping[str, float] | None], columns: Sequence[str] = _COLUMNS
) -> list[str]:
    """A table in milliseconds with a row for each title, of distributions in seconds as
    `records.distribution` gives them; None shows dashes."""
    lines = [f"{'milliseconds':<26}" + "".join(f"{column:>12}" for column in columns)]
    for title, values in figures.items():
        cells = ["-" if values is None else f"{values[key] * 1000:.2f}" for key in columns]
        lines.append(f"{title:<26}" + "".join(f"{cell:>12}" for cell in cells))
    return lines


def write_document(document: Mapping[str, Any], path: Path | None, *, stdout: bool = True) -> None:
    """One line of JSON, into the file if there is a path, and onto stdout."""
    line = json.dumps(document, ensure_ascii=False)
    if path is not None:
        path.write_text(line + "\n")
    if stdout:
        print(line)  # noqa: T201


def give_document(document: Mapping[str, Any], path: Path | None) -> None:
    """The document into the file if there is a path, else onto a stdout that is no terminal."""
    write_document(document, path, stdout=path is None and not sys.stdout.isatty())


def _commit() -> str | None:
    """None outside our git repository, or without git."""
    if not (_ROOT / ".git").exists():
        return None  # installed, and in a folder that may be another's repository
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _memory_bytes() -> int | None:
    """None on Windows."""
    has_it = hasattr(os, "sysconf")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if has_it else None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
