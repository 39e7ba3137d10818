"""A pytest plugin: a line of JSON for each test that is found, and for each result as it is known.

A process that dies leaves what it had written.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

ROWS_VARIABLE = "GPU_RUN_ROWS"


def _emit(row: dict[str, Any]) -> None:
    with Path(os.environ[ROWS_VARIABLE]).open("a") as file:
        print(json.dumps(row), file=file, flush=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _emit({"name": item.nodeid, "state": "found"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    row: dict[str, Any] = {"name": report.nodeid, "state": report.outcome}
    row["seconds"] = round(report.duration, 3)
    if report.skipped:
        row["why"] = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "skipped"
    elif report.failed:
        row["why"] = " | ".join(report.longreprtext.strip().splitlines()[-6:])[:800]
    _emit(row)
