"""The interpreter's tests run on a GPU too: torch then makes tensors there by default."""

import functools
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.device import DEVICE

ON_CPU_TENSORS = {
    "test_attention_work",
    "test_device_steps",
    "test_operations",
    "test_packing_triton",
    "test_quantised_weights",
    "test_step_inputs",
    "test_truncation",
}
"""These name the CPU as their device; tests/gpu has what they call on a GPU."""


@pytest.fixture(autouse=True)
def default_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    if DEVICE == "cpu":
        yield
        return
    if request.path.stem in ON_CPU_TENSORS:
        pytest.skip("on CPU tensors only")
    monkeypatch.setattr(torch, "Generator", functools.partial(torch.Generator, device=DEVICE))
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
