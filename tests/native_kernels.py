"""The native library for tests that need it. Not a test."""

import os
from typing import NoReturn

import pytest

from kernels.cpu.library import NativeLibrary, NativeLibraryUnavailable, load_library

REQUIRED_VARIABLE = "REQUIRE_NATIVE_KERNELS"


def native_library_or_skip() -> NativeLibrary:
    """Built once into the user's cache."""
    try:
        return load_library()
    except NativeLibraryUnavailable as error:
        skip_without_native_kernels(str(error))


def skip_without_native_kernels(reason: str) -> NoReturn:
    """A failure if REQUIRE_NATIVE_KERNELS is 1, as in `make test`."""
    if os.environ.get(REQUIRED_VARIABLE) == "1":
        pytest.fail(
            f"this test needs the native kernels: {reason}. {REQUIRED_VARIABLE} is 1; with 0 the "
            "test is skipped",
            pytrace=False,
        )
    pytest.skip(reason)
