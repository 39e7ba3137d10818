"""The scripted engine of the client's tests, found by path, and an address for it."""

import shutil
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "frontend"))


@pytest.fixture
def address():
    folder = tempfile.mkdtemp(prefix="lt-")  # pytest's own are too long for a socket
    yield f"ipc://{folder}/engine.sock"
    shutil.rmtree(folder)
