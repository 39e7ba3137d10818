"""A pytest plugin: a row for each test that is found, and for each result as it is known."""

import pytest

from scripts.gpu.timing import Row, emit


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        emit({"name": item.nodeid, "state": "found"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    row: Row = {"name": report.nodeid, "state": report.outcome}
    row["seconds"] = round(report.duration, 3)
    if report.skipped:
        row["why"] = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "skipped"
    elif report.failed:
        row["why"] = " | ".join(report.longreprtext.strip().splitlines()[-6:])[:800]
    emit(row)
