"""A plugin of pytest: each test that ends is a line of the file that `ROWS_VARIABLE` names, so that
a run that is killed leaves what it knew. With several processes the one that leads them writes."""

import os
from collections.abc import Sequence
from typing import Any

import pytest

from scripts.gpu.timing import Row, emit

_MOST_WHY = 400


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Rows(is_worker=hasattr(config, "workerinput")))


class _Rows:
    def __init__(self, *, is_worker: bool) -> None:
        self._is_worker = is_worker
        self._has_names = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """The same of every process."""
        if not self._has_names:
            emit({"collected": list(ids)})
        self._has_names = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._is_worker:
            emit({"name": report.nodeid, "state": "failed", "why": _why(report)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_worker or (report.passed and report.when != "call"):
            return
        row: Row = {"name": report.nodeid, "state": report.outcome}
        emit(row if report.passed else row | {"why": _why(report)})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """A process whose use of the GPU an error has ended is ended, and another takes its place:
        else every later test of it would fail."""
        report = yield
        if report.failed and self._is_worker and _has_lost_gpu():
            emit({"name": item.nodeid, "state": "failed", "why": _why(report)})
            os._exit(1)
        return report


def _has_lost_gpu() -> bool:
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The error, or why it was skipped, on one line."""
    longrepr: Any = report.longrepr
    if isinstance(longrepr, tuple):  # file, line, reason
        text = longrepr[2]
    else:
        text = getattr(getattr(longrepr, "reprcrash", None), "message", None) or str(longrepr)
    return " ".join(str(text).split())[:_MOST_WHY]
