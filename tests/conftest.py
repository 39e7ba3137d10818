"""What all tests share: no network, few threads, Ctrl-C as at a terminal, kernels interpreted."""

import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("full", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=100)
settings.register_profile("check", deadline=None, max_examples=10, stateful_step_count=20)
settings.load_profile("full")

# tests import parts of other tests as tests.X, and scripts.X, by whatever command they are started
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_DATA_HOME"] = "/nonexistent"  # presets of the user's own
# with several test processes (pytest -n) each has a core
os.environ.setdefault("OMP_NUM_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")


def _gpu_is_used() -> bool:
    """TEST_DEVICE=cuda runs the tests of kernels on a GPU, if torch sees one."""
    if os.environ.get("TEST_DEVICE") != "cuda":
        return False
    import torch

    return torch.cuda.is_available()


GPU_IS_USED = _gpu_is_used()
if not GPU_IS_USED:
    # Triton asks when it is imported, and transformers and accelerate import it: so before any test
    os.environ["TRITON_INTERPRET"] = "1"

# Interpreted dots are numpy's products, and tests of batch invariance need kernels of OpenBLAS that
# give a row the same bits at every place in a tile. Those for Haswell do not.
cpuinfo = Path("/proc/cpuinfo")
has_avx512 = cpuinfo.exists() and "avx512f" in cpuinfo.read_text()
os.environ["OPENBLAS_CORETYPE"] = "SkylakeX" if has_avx512 else "Nehalem"

# a shell that starts the tests in its background lets them, and all their children, ignore Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup() -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None and hasattr(interpreter, "InterpretedFunction"):
        from tests.quick_interpreter import make_quick

        make_quick(interpreter)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # long ones first: with several processes none has one left when the others are done
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if not GPU_IS_USED:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU and TEST_DEVICE=cuda"))
