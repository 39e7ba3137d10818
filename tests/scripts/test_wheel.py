"""What `make wheel` makes: all of the program, and native kernels that need no compiler."""

import os
import platform
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from scripts.wheel import ROOT, WheelError, build_wheel, check_machine, head
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
def wheel(tmp_path_factory):
    """With the library that the tests have built."""
    made = build_wheel(tmp_path_factory.mktemp("wheel"), native_library_or_skip().path)
    assert made.name.startswith("engine_core-")
    assert made.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel):
    """A wheel's files as pip puts them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(wheel.parent / "installed")
    return wheel.parent / "installed"


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


@pytest.mark.packages
def test_alone_it_is_the_client_without_torch(wheel, tmp_path):
    """By pip, from the package index."""
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    environment = {"HOME": str(tmp_path), "PATH": str(programs)} | {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))
    }

    def run(program, *arguments):
        command = [programs / program, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = run("python", "-m", "pip", "install", "-q", str(wheel))
    assert done.returncode == 0, done.stderr
    assert run("python", "-c", "import torch").returncode == 1
    assert run("engine-client", "ps").returncode == 0
    assert "--max-concurrency" in run("engine-client", "bench", "--help").stdout
    assert "of the extra `bench`" in run("engine-client", "bench").stderr
    assert "engine-core[bench]" in run("engine-core", "plan").stderr
    started = run("engine-core", "smollm2-135m-instruct")
    assert started.returncode == 3
    typed = f"{programs / 'python'} -m pip install 'engine-core[cpu] @ file://{wheel}'"
    assert typed.replace("[cpu]", "[gpu]" if "[gpu]" in started.stderr else "[cpu]") in (
        started.stderr
    )


def test_a_compiler_for_another_machine_is_refused(tmp_path):
    other = "aarch64" if platform.machine() == "x86_64" else "x86_64"
    library = tmp_path / "library.so"
    library.write_bytes(Path(sys.executable).resolve().read_bytes()[:64])
    check_machine(library, platform.machine())
    with pytest.raises(WheelError, match=rf"code for {platform.machine()}, --machine is {other}"):
        check_machine(library, other)
