"""Compilations are counted where Triton tells of them."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton import knobs
from triton.runtime.jit import JitFunctionInfo

from kernels.compile_counter import CompileCounter, watch_triton

pytestmark = pytest.mark.slow


def compile_something():
    """What Triton calls when a kernel has been compiled, with the arguments that it gives."""
    return knobs.runtime.jit_post_compile_hook(
        key="k",
        repr="norm[num_warps=4](x: *fp16)",
        fn=JitFunctionInfo("kernels.norm", "norm", None),
        compile={"key": "k"},
        is_manual_warmup=False,
        already_compiled=False,
    )


@pytest.fixture
def counter():
    counter = CompileCounter()
    end = watch_triton(counter)
    yield counter
    end()


def test_only_those_after_ready_count_as_such_and_are_warned_of(counter, caplog):
    compile_something()
    assert (counter.num_compilations, counter.num_after_ready) == (1, 0)
    counter.mark_ready()
    assert counter.num_after_ready == 0
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        compile_something()
    assert (counter.num_compilations, counter.num_after_ready) == (2, 1)
    [record] = caplog.records
    assert "kernels.norm.norm was compiled while serving (1 since ready)" in record.getMessage()
    assert "norm[num_warps=4](x: *fp16)" in record.getMessage()


def test_a_hook_that_was_there_is_called_and_comes_back(monkeypatch):
    calls = []

    def other(**event):
        calls.append(event)
        return True

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", other)
    counter = CompileCounter()
    end = watch_triton(counter)
    assert compile_something() is True
    assert (counter.num_compilations, len(calls)) == (1, 1)
    end()
    assert knobs.runtime.jit_post_compile_hook is other
    compile_something()
    assert (counter.num_compilations, len(calls)) == (1, 2)


def test_a_real_compilation_is_counted_once(tmp_path):
    """By Triton itself, without a GPU: in a process of its own, where kernels are compiled."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from kernels.compile_counter import CompileCounter, watch_triton


class NoDevice:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


@triton.jit
def fill(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, SIZE), 1.0)


driver.set_active(NoDevice())
counter = CompileCounter()
watch_triton(counter)
x = torch.empty(64, device="meta")
counts = []
for size in (32, 32, 64):
    fill.warmup(x, SIZE=size, grid=(1,))
    counts.append(counter.num_compilations)
print(counts)
"""
    )
    environment = {name: v for name, v in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(Path.cwd())}
    for _ in range(2):  # the second time from the cache on disk: a first use all the same
        done = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.stdout.strip() == "[1, 1, 2]", done.stderr
