"""What all tests share: no network, few threads, Ctrl-C as at a terminal, kernels interpreted."""

import os
import signal
import sys
from pathlib import Path

# tests import parts of other tests as tests.X, and scripts.X, by whatever command they are started
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

# Triton asks when it is imported, and transformers and accelerate import it: so before any test is
os.environ["TRITON_INTERPRET"] = "1"

# a shell that starts the tests in its background lets them, and all their children, ignore Ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
