"""Tests of the native kernels where these cannot be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

_ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("required", "words"),
    [
        ("1", "needs the native kernels: switched off by ENGINE_CORE_NATIVE=0. REQUIRE_NATIVE_KER"),
        ("0", "1 skipped"),
    ],
)
def test_they_are_skipped_and_fail_where_the_kernels_are_required(required, words):
    test = "tests/kernels/test_backends.py::test_a_cpu_has_the_native_kernels"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", test],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"ENGINE_CORE_NATIVE": "0", "REQUIRE_NATIVE_KERNELS": required},
    )
    assert run.returncode == int(required)
    assert words in run.stdout


def test_make_requires_them():
    makefile = (_ROOT / "Makefile").read_text()
    assert "\nexport REQUIRE_NATIVE_KERNELS ?= 1\n" in makefile
