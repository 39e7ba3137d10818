"""What the two commands say where their packages are gone, hidden, or those of the client alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from engine_core import installation
from engine_core.installation import ENGINE_PACKAGES, missing_engine

ROOT = Path(installation.__file__).parents[1]
PACKAGES = ("engine_core", "frontend", "kernels", "protocol")
HIDE = f"""
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ENGINE_PACKAGES}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
of = [str(getattr(each, "__module__", "")) for each in sys.meta_path]
sys.meta_path = [e for e, its in zip(sys.meta_path, of) if "__editable__" not in its]
"""
FROM_GIT = {"url": "https://host/e.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}
RUN = "from engine_core.installation import engine_core, engine_client; {}()"


@pytest.fixture
def run_program(tmp_path):
    """A console script of a tree, whose packages it may lack; what it says."""

    def run(program, *arguments, tree=ROOT, before="", **environment):
        code = HIDE + before + RUN.format(program.replace("-", "_"))
        return subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tree)} | environment,
        )  # fmt: skip

    return run


@pytest.fixture
def without_engine(run_program):
    hide = (
        "import importlib.util as u\nfound = u.find_spec\n"
        f"u.find_spec = lambda n, *a: None if n in {ENGINE_PACKAGES} else found(n, *a)\n"
        "sys.meta_path.insert(0, Hidden())\n"
    )
    return lambda *arguments: run_program(*arguments, before=hide)


def test_the_extra_brings_what_the_engine_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", each)[0] for each in project["optional-dependencies"]["cpu"]]
    assert names == [*ENGINE_PACKAGES]
    base = " ".join(project["dependencies"])
    assert not [name for name in ENGINE_PACKAGES if re.search(rf"\b{name}\b", base)]


@pytest.mark.parametrize("arguments", [["smollm2-135m-instruct"], ["pull", "x"], ["list"]])
def test_without_the_engines_packages_one_line_says_what_to_type(without_engine, arguments):
    done = without_engine("engine-core", *arguments)
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert "the client is installed, the engine is not" in line
    assert "engine-core[cpu]" in line or "engine-core[gpu]" in line


def test_the_client_and_doctor_run_without_the_engines_packages(without_engine):
    assert without_engine("engine-client", "ps").returncode == 0
    done = without_engine("engine-core", "doctor")
    assert done.returncode == 1
    assert "the client is installed, the engine is not" in " ".join(done.stdout.split())
    assert done.stderr == ""


def test_commands_that_need_numpy_alone_name_its_extra(without_engine):
    for program, command, code in (("engine-core", "plan", 3), ("engine-client", "bench", 2)):
        done = without_engine(program, command)
        assert done.returncode == code, done.stderr
        [line] = done.stderr.splitlines()
        assert "NumPy" in line and "bench" in line


class Installed:
    """A distribution as pip or uv notes it."""

    def __init__(self, installer, origin):
        self.texts = {"INSTALLER": installer, "direct_url.json": origin and json.dumps(origin)}

    def read_text(self, name):
        return self.texts[name]


@pytest.mark.parametrize(
    ("installer", "origin", "has_gpu", "typed"),
    [
        ("pip", None, False,
         "PY -m pip install 'engine-core[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu"),
        ("pip", {"url": "file:///w/e.whl", "archive_info": {}}, True,
         "PY -m pip install 'engine-core[gpu] @ file:///w/e.whl'"),
        ("uv\n", FROM_GIT, False,
         "uv pip install --python PY 'engine-core[cpu] @ git+https://host/e.git@abc' "
         "--torch-backend=cpu"),
    ],
)  # fmt: skip
def test_what_to_type_is_of_the_installer_the_source_and_the_machine(
    monkeypatch, installer, origin, has_gpu, typed
):
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    monkeypatch.setattr(installation, "distribution", lambda _: Installed(installer, origin))
    said = missing_engine(has_gpu=has_gpu)
    assert said.partition("type: ")[2] == typed.replace("PY", sys.executable)


def test_with_the_engines_packages_nothing_is_said():
    assert missing_engine(has_gpu=False) is None


@pytest.mark.parametrize(
    ("gone", "program", "arguments"),
    [
        ("kernels/__init__.py", "engine-core", ["doctor"]),
        ("kernels/cpu/library.py", "engine-core", ["doctor"]),
        ("protocol/logs.py", "engine-core", ["--version"]),
        ("frontend/cli/app.py", "engine-client", ["ps"]),
    ],
)
def test_files_that_went_with_another_package_are_one_line(
    run_program, tmp_path, gone, program, arguments
):
    tree = tmp_path / "tree"
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "page", "src")
        shutil.copytree(ROOT / package, tree / package, ignore=ignored)
    (tree / gone).unlink()
    done = run_program(program, *arguments, tree=tree)
    assert done.returncode == 3
    [line] = done.stderr.splitlines()
    assert gone.partition("/")[0] in line
    assert "install engine-core again: " in line


def test_a_package_of_another_that_hides_ours_is_named(run_program, tmp_path):
    other = tmp_path / "other" / "frontend"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    path = f"sys.path.insert(0, {str(other.parent)!r})\n"
    done = run_program("engine-client", "ps", before=path)
    assert done.returncode == 3
    assert done.stderr.startswith(f"engine-client: the package `frontend` at {other} hides")


def test_the_version_is_that_of_the_distribution(run_program):
    for program in ("engine-core", "engine-client"):
        said = run_program(program, "--version").stdout.strip()
        assert re.fullmatch(
            re.escape(metadata.version("engine-core")) + r"( \(commit [0-9a-f]{8}\+?\))?", said
        )
