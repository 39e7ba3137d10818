"""What the start does beside its own work, each in a Python of its own or undone afterwards."""

import gc
import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from engine_core.startup import before_torch
from engine_core.startup.before_torch import load_torch_library_beside, no_garbage_collection


def run(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


def test_the_library_is_there_before_torch_and_torch_works_with_it():
    program = """
import sys
from pathlib import Path
from engine_core.startup.before_torch import load_torch_library_beside
thread = load_torch_library_beside()
if thread is None:  # a build for GPUs, or another system
    print("none")
else:
    thread.join()
    print("torch" in sys.modules, "libtorch_cpu" in Path("/proc/self/maps").read_text())
import torch
print((torch.ones(3, 5) @ torch.ones(5, 2)).sum().item())
"""
    *before, product = run(program)
    assert before in (["none"], ["False", "True"])
    assert product == "30.0"


def test_an_exit_right_after_it_has_begun_is_clean():
    program = """
from engine_core.startup.before_torch import load_torch_library_beside
load_torch_library_beside()
print("end")
raise SystemExit(0)
"""
    assert run(program) == ["end"]


@pytest.mark.parametrize("library", ["libtorch_cuda.so", "libtorch_hip.so", None])
def test_without_a_library_for_cpus_alone_no_thread_is_started(monkeypatch, tmp_path, library):
    (tmp_path / "lib").mkdir()
    if library is not None:
        (tmp_path / "lib" / "libtorch_cpu.so").touch()
        (tmp_path / "lib" / library).touch()
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: spec)
    assert load_torch_library_beside() is None


def test_without_torch_no_thread_is_started(monkeypatch):
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: None)
    assert load_torch_library_beside() is None


def test_a_library_that_does_not_load_is_left_to_the_import(monkeypatch, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cpu.so").write_bytes(b"no library")
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(before_torch.importlib.util, "find_spec", lambda _: spec)
    thread = load_torch_library_beside()
    thread.join()
    assert not thread.is_alive()


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_comes_back_and_leaves_alone_what_the_start_made(fails):
    kept = []
    try:
        with no_garbage_collection():
            assert not gc.isenabled()
            kept.append([kept])
            if fails:
                raise RuntimeError("the start failed")
    except RuntimeError:
        assert fails
    try:
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(thing is kept for thing in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(thing is kept for thing in gc.get_objects())
