"""What a run is reported as: one JSON document for programs, a table for people.

Must not know how requests are sent.
"""

import datetime
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_LATENCIES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "inter_token_s": "inter-token latency",
    "end_to_end_s": "end-to-end latency",
    "client_lateness_s": "client's own lateness",
}
_COLUMNS = ("mean", "p50", "p90", "p99", "max")


def environment() -> dict[str, Any]:
    """Versions, commit and machine, so that a figure can be traced."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "num_cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in ("engine-core", "pyzmq", "msgspec")},
        **_commit(),
    }


def as_table(summary: dict[str, Any]) -> str:
    """The summary for a terminal; latencies in milliseconds."""
    throughput = summary["throughput"]
    lines = [
        f"{summary['num_finished']} of {summary['num_requests']} requests finished in "
        f"{summary['duration_s']:.2f} s",
        f"{throughput['requests_per_s']:.2f} requests/s, "
        f"{throughput['prompt_tokens_per_s']:.1f} prompt tok/s "
        f"({summary['num_cached_tokens']} of {summary['num_prompt_tokens']} tokens cached), "
        f"{throughput['output_tokens_per_s']:.1f} output tok/s",
        f"{'milliseconds':<24}" + "".join(f"{column:>11}" for column in _COLUMNS),
    ]
    for name, title in _LATENCIES.items():
        figures = summary[name]
        cells = (
            ["-"] * len(_COLUMNS)
            if figures is None
            else [f"{figures[column] * 1000:.2f}" for column in _COLUMNS]
        )
        lines.append(f"{title:<24}" + "".join(f"{cell:>11}" for cell in cells))
    lines += [f"failed, {kind}: {count}" for kind, count in summary["errors"].items()]
    return "\n".join(lines)


def as_json(document: dict[str, Any]) -> str:
    """One line."""
    return json.dumps(document, ensure_ascii=False)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any]:
    """None outside a git repository, or without git."""
    folder = Path(__file__).parent
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "has_local_changes": bool(_git(folder, "status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "has_local_changes": None}


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()
