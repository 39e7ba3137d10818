"""A short run of the fuzzing job: no wrong call of the native library touches memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.library import build_library, cache_folder
from tests.native_kernels import native_library_or_skip, skip_without_native_kernels

SCRIPT = Path(__file__).with_name("run.py")


def fuzz(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--seed", "1000", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.extended  # the first run builds the library with its sanitizers
def test_random_calls_touch_no_memory_that_is_not_theirs() -> None:
    done = fuzz("--seconds", "3")
    if done.returncode == 2:
        skip_without_native_kernels(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rounds of" in done.stdout


@pytest.mark.slow
def test_right_calls_return_and_wrong_ones_are_refused() -> None:
    native_library_or_skip()
    done = fuzz("--seconds", "0", "--child", str(build_library(cache_folder())))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "1 rounds of" in done.stdout
