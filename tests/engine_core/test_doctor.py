"""`engine-core doctor`, on this machine and on made-up ones."""

import json
import os
import platform
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

from engine_core import doctor
from engine_core.doctor import as_text, examine
from engine_core.errors import StartupError
from kernels.cpu import library as native
from kernels.cpu.threads import choose_threads


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    """Of the variables and caches of who runs the tests nothing is seen."""
    for name in ("OMP_NUM_THREADS", "ENGINE_CORE_NATIVE_THREADS", "ENGINE_CORE_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    library = SimpleNamespace(isa="avx2", machine_isa="avx2", has_bfloat16=False, path=None)
    monkeypatch.setattr(native, "load_library", lambda: library)  # no other pool for other tests
    for name in ("HF_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "hidden-word")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def slow_machine(monkeypatch, tmp_path):
    """All that costs speed: two CPUs a core, a quota of one, no huge pages, swapping, an old
    Linux, a slow frequency; and port 8000 is taken."""
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Old Horse 9000\n",
        "proc/meminfo": "SwapTotal:  900000000 kB\nSwapFree:  1000 kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/net/tcp": "  sl  local_address ...\n"
        "   0: 00000000:1F40 00000000:0000 0A 0 0 0 0 0 77\n"
        "   1: 0100007F:2CAA 00000000:0000 01 0 0 0 0 0 78\n",
        "proc/123/comm": "python\n",
        "proc/123/cmdline": "python --api-key hidden-word",
        "sys/fs/cgroup/cpu.max": "100000 100000",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
        "sys/devices/system/node/node0/cpulist": "0-1\n",
        "sys/devices/system/node/node1/cpulist": "2-3\n",
    }
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files |= {siblings.format(cpu): f"{cpu % 2},{cpu % 2 + 2}" for cpu in range(4)}
    root = tmp_path / "root"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "proc/123/fd").mkdir()
    (root / "proc/123/fd/5").symlink_to("socket:[77]")
    on_four = partial(choose_threads, allowed=frozenset(range(4)))
    monkeypatch.setattr(doctor, "choose_threads", on_four)
    monkeypatch.setattr(platform, "release", lambda: "5.4.0-generic")
    return root


def program(folder, name, text):
    """An executable that prints a text."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    file.chmod(0o755)
    return str(file)


def test_everything_that_costs_speed_is_a_line_with_what_to_do(slow_machine):
    found = examine(slow_machine)
    assert found["processor"][0] == {
        "model": "Old Horse 9000", "cpus": os.cpu_count(), "allowed": len(os.sched_getaffinity(0)),
        "cores": 2, "nodes": 2, "governor": "powersave",
    }  # fmt: skip
    assert found["threads"][0]["num_threads_reason"] == "1 of 4 CPUs: a quota of 1 CPUs"
    helps = [line for name in ("processor", "threads", "memory") for line in found[name][1]]
    words = ("cpupower", "cpu.max", "echo madvise", "swapoff", "5.14")
    assert [word in line for word, line in zip(words, helps, strict=True)] == [True] * 5
    assert found["ports"][0] == {"8000": "used by python, pid 123", "11434": "free"}
    lines = as_text(found, 100)
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    assert "hidden-word" not in "".join(lines)
    assert lines[-1].endswith("--json") or "5.14" in lines[-1]


def test_it_says_what_is_here_without_torch(tmp_path):
    code = (
        "import sys; from engine_core.cli import main\ntry: main()\nexcept SystemExit as end: "
        "sys.exit(end.code or 'torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "doctor", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(ran.stdout)
    assert ran.stderr == ""
    assert found["versions"]["can_run"]
    assert found["kernels"]["built"] == ("instruction_set" in found["kernels"])
    assert found["models"]["folder"] == str(tmp_path / "cache/models")
    assert found["memory"]["total_bytes"] > found["memory"]["free_bytes"] > 0
    assert "hidden-word" not in ran.stdout


def test_a_question_that_fails_is_a_line(run, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    monkeypatch.setattr(doctor, "running_daemons", lambda: 1 // 0)
    code, out, err = run("doctor")
    assert (code, err) == (1, "")  # no engine starts with that
    assert "engines         unknown integer division or modulo by zero" in out
    assert "threads         unknown OMP_NUM_THREADS is 'many'" in out


def test_exit_code_1_where_the_engine_could_not_run(run, monkeypatch):
    def refuse():
        raise StartupError("`kernels` of another is installed; run pip uninstall kernels")

    monkeypatch.setattr(doctor, "check_kernels_package", refuse)
    code, out, _ = run("doctor")
    assert code == 1
    assert "would help      `kernels` of another is installed; run pip uninstall kernels" in out


def test_without_a_compiler_torch_runs_and_the_cure_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("ENGINE_CORE_NATIVE_CACHE", str(tmp_path / "native"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    found = examine()
    facts, (help_,) = found["kernels"]
    assert facts == {"kind": "torch", "compiler": "none", "built": False}
    assert help_.endswith("apt-get install g++)")
    assert found["will_use"][0]["dtype_reason"] == "there are no native kernels"


@pytest.mark.parametrize(
    ("torch_says", "hidden", "device", "help_"),
    [
        ("a warning\nok", None, "cuda", None),
        ("torch is for CUDA 13.0: update the driver", None, "cpu", "CUDA 13.0: update the driver"),
        ("ok", "", "cpu", "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_gpu_is_said_by_its_driver_and_by_torch(
    monkeypatch, tmp_path, torch_says, hidden, device, help_
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    gpu = "NVIDIA H200, 143771 MiB, 570.86.15"
    program(tmp_path / "bin", "nvidia-smi", gpu)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", program(tmp_path / "bin", "python", torch_says))
    found = examine()
    facts, helps = found["gpu"]
    assert facts == {"nvidia_smi": [gpu], "torch_can_use_it": device == "cuda"}
    assert found["will_use"][0]["device"] == device
    assert [help_ in line for line in helps] == ([True] if help_ else [])
