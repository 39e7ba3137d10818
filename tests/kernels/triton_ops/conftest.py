"""Kernels run in Triton's interpreter here: on a CPU, one program after the other."""

import os

os.environ["TRITON_INTERPRET"] = "1"
