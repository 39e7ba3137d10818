"""The device that tests of kernels run on: the CPU, where Triton interprets, or a GPU."""

import os
from typing import Any

import pytest

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
"""`TEST_DEVICE=cuda` makes it a GPU, see tests/conftest.py."""


def on_gpu(*values: Any, id: str | None = None) -> Any:
    """A case too large for the interpreter, or in a dtype that it lacks."""
    return pytest.param(*values, id=id, marks=pytest.mark.gpu)


def in_interpreter(*values: Any, id: str | None = None) -> Any:
    """A case in dtypes that kernels on a GPU are not made for."""
    mark = pytest.mark.skipif(DEVICE == "cuda", reason="for the interpreter")
    return pytest.param(*values, id=id, marks=mark)
