"""What `make wheel` makes: all of the program, and native kernels that need no compiler."""

import os
import subprocess
import sys
import zipfile

import pytest

from scripts.wheel import ROOT, build_wheel, head
from tests.native_kernels import native_library_or_skip

pytestmark = pytest.mark.slow

PACKAGES = ("engine_core", "frontend", "kernels", "protocol")
SERVE = """
from frontend import LLM, SamplingParams
with LLM(model="smollm2-135m-instruct") as llm:
    [answer] = llm.generate(["The capital of France is"], SamplingParams(max_tokens=4))
    print(answer.outputs[0].text)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A wheel's files as pip puts them, with the library that the tests have built."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build_wheel(folder, native_library_or_skip().path)
    assert wheel.name.startswith("engine_core-")
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def files(root):
    return {
        str(path.relative_to(root))
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_a_wheel_has_every_file_of_the_packages_and_one_library(installed):
    added = files(installed) - files(ROOT)
    assert files(ROOT) <= files(installed)
    library, *others = sorted(added)
    assert library.startswith("kernels/cpu/prebuilt/")
    assert library.endswith(".so")
    assert others == ([] if head() is None else ["protocol/commit.txt"])
    shared = next(installed.glob("*.data/data/share/engine-core"))
    names = {path.name for path in shared.rglob("*") if path.is_file()}
    assert {"dashboard.json", "alerts.yml", "engine-core.service"} <= names


def test_without_a_compiler_the_wheels_own_kernels_run_a_model(installed, tmp_path):
    (tmp_path / "bin").mkdir()
    environment = os.environ | {"PYTHONPATH": str(installed), "PATH": str(tmp_path / "bin")}
    environment |= {"ENGINE_CORE_NATIVE_CACHE": str(tmp_path / "native")}
    environment.pop("CXX", None)
    asked = [sys.executable, "-m", "engine_core.cli", "doctor"]
    said = subprocess.run(
        asked, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert "compiler none, built yes, by the wheel" in " ".join(said.split())
    served = subprocess.run(
        [sys.executable, "-c", SERVE], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert served.stdout.strip(), served.stderr
    assert not (tmp_path / "native").exists()
