"""One seed for every test, which a run of all checks may choose."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE

sys.path.insert(0, str(Path(__file__).parents[1] / "engine_core"))  # writers of folders


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(int(os.environ.get("TEST_SEED", "3")))
