"""A short run of the fuzzing job: no wrong call of the native library touches memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.native_kernels import skip_without_native_kernels

SCRIPT = Path(__file__).with_name("run.py")


@pytest.mark.slow  # the first run builds the library with its sanitizers
def test_random_calls_touch_no_memory_that_is_not_theirs() -> None:
    command = [sys.executable, str(SCRIPT), "--seconds", "3", "--seed", "1000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode == 2:
        skip_without_native_kernels(done.stderr.strip())
    assert done.returncode == 0, done.stderr[-4000:]
    assert "rounds of" in done.stdout
