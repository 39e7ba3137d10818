"""One seed for every test, which a run of all checks may choose."""

import os

import pytest
import torch

from tests.gpu.device import DEVICE


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(int(os.environ.get("TEST_SEED", "3")))
