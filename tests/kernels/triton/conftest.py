"""The interpreter's tests run on a GPU too: torch then makes tensors there by default."""

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device import DEVICE

INTERPRETED_ONLY = {
    "test_block_copies_triton",
    "test_device_steps",
    "test_operations",
    "test_packing_triton",
    "test_paged",
    "test_quantised_weights",
    "test_truncation",
}
"""These name the CPU as their device, or have dtypes that kernels on a GPU are not made for. What
they call is in tests/gpu."""


@pytest.fixture(autouse=True)
def default_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if DEVICE == "cpu":
        yield
        return
    if request.path.stem in INTERPRETED_ONLY:
        pytest.skip("for the interpreter")
    monkeypatch.setattr(torch, "Generator", functools.partial(torch.Generator, device=DEVICE))
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
