"""The native library, built once into the user's cache, on each instruction set of this machine."""

import os
from collections.abc import Iterator

import pytest

from kernels.cpu.library import NativeLibrary
from tests.kernels.cpu.instruction_sets import SETS
from tests.native_kernels import native_library_or_skip

# two threads at least, so that tests see tasks shared out
os.environ.setdefault("ENGINE_CORE_NATIVE_THREADS", "2")


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    return native_library_or_skip()


def _forced(isa: str, library: NativeLibrary) -> Iterator[str]:
    if isa not in library.isas:
        pytest.skip(f"this machine has no {isa}")
    with library.forced_isa(isa):
        yield isa


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest, library: NativeLibrary) -> Iterator[str]:
    """The test runs on this instruction set, or is skipped where the machine lacks it."""
    yield from _forced(request.param, library)


@pytest.fixture(params=("amx", "amx_emulated"))
def matrix_isa(request: pytest.FixtureRequest, library: NativeLibrary) -> Iterator[str]:
    """The matrix unit where the machine has one, and its emulation where vectors have the rest."""
    yield from _forced(request.param, library)


@pytest.fixture(params=("avx512_bf16", "amx", "amx_emulated"))
def pairs_isa(request: pytest.FixtureRequest, library: NativeLibrary) -> Iterator[str]:
    """Each that multiplies pairs of bfloat16."""
    yield from _forced(request.param, library)
