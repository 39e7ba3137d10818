"""A scripted engine of a model that takes images."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "http")]

from multimodal_model import INFO, PARTS_TEMPLATE  # noqa: E402


@pytest.fixture
def multimodal_engine(start_engine):
    return start_engine(multimodal=INFO, chat_template=PARTS_TEMPLATE)
