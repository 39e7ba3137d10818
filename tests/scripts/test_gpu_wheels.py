"""Wheels for the GPU machine, with a wheel made here; needs no network."""

import importlib
import os
import subprocess
import sys
import zipfile

import pytest

from scripts.fetch_wheels import WheelsNotFetched, fetch_wheels
from scripts.gpu.wheels import PACKAGES, WheelsNotInstalled, installed_wheels, missing_modules

CARRIED = {"carried_module": "carried-package==1.2"}


@pytest.fixture
def folder(tmp_path):
    """A folder with one wheel."""
    info = "carried_package-1.2.dist-info"
    tag = "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "carried_package-1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_module.py", "ANSWER = 41\n")
        wheel.writestr(f"{info}/WHEEL", tag)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried-package\nVersion: 1.2\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def test_a_missing_module_can_be_imported_here_and_by_children_and_is_gone_afterwards(folder):
    assert missing_modules(CARRIED) == ["carried_module"]
    before = dict(os.environ)
    path = list(sys.path)
    with installed_wheels(folder, CARRIED):
        assert importlib.import_module("carried_module").ANSWER == 41
        child = [sys.executable, "-c", "import carried_module; print(carried_module.ANSWER)"]
        assert subprocess.run(child, capture_output=True, text=True, check=True).stdout == "41\n"
    sys.modules.pop("carried_module")
    assert missing_modules(CARRIED) == ["carried_module"]
    assert dict(os.environ) == before
    assert sys.path == path


def test_nothing_is_installed_where_nothing_is_missing(tmp_path):
    before = os.environ.get("PYTHONPATH")
    with installed_wheels(tmp_path / "no such folder", {"json": "json==1"}):
        assert os.environ.get("PYTHONPATH") == before


def test_a_wheel_that_is_not_there_is_named_with_what_to_do(folder):
    with (
        pytest.raises(WheelsNotInstalled, match=r"other==3 cannot be .*fetch_wheels\.py"),
        installed_wheels(folder, {"other_module": "other==3"}),
    ):
        pass


def test_wheels_that_are_there_are_not_fetched_again(folder, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("fetched"))
    assert fetch_wheels(folder, CARRIED.values()) == folder


def test_a_fetch_that_fails_says_why_and_leaves_the_folder_as_it_was(folder, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(WheelsNotFetched, match="no network"):
        fetch_wheels(folder, ["another==3"])
    assert [path.name for path in folder.parent.iterdir()] == ["wheels"]
    assert len(list(folder.iterdir())) == 1


def test_a_wheel_of_another_version_is_replaced(folder, monkeypatch):
    def download(command, **_):
        from pathlib import Path

        (Path(command[command.index("--dest") + 1]) / "carried_package-2.0-x.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr("subprocess.run", download)
    fetch_wheels(folder, ["carried-package==2.0"])
    assert [path.name for path in folder.iterdir()] == ["carried_package-2.0-x.whl"]


def test_every_listed_package_is_one_that_the_project_has_here():
    assert missing_modules(PACKAGES) == []
