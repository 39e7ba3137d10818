"""What the native library knows of a captured pass: the mirror of `src/graph.h`."""

import ctypes
from enum import IntEnum

import torch

from kernels.cpu.library import FLOAT, INT64, POINTER, members
from kernels.interface.operations import AllReduce

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")
"""Activations in the order of ec_activation's numbers."""


class GraphOpKind(IntEnum):
    """Those of `GraphOpKind` in src/graph.h, by its numbers."""

    EMBEDDING = 0
    RMS_NORM = 1
    ADD_RMS_NORM = 2
    LINEAR = 3
    ROTARY = 4
    ATTENTION = 5
    SILU = 6
    GELU_TANH = 7
    SCALE = 8
    EMBEDDING_PACKED = 9
    LORA = 10
    GIVEN_ROWS = 11
    COPY = 12
    LAYER_NORM = 13
    ADD_LAYER_NORM = 14
    GELU = 15
    ACTIVATE = 16
    EMBEDDING_AT = 17
    HOST = 18
    EXPERTS = 19
    TAKE_ROWS = 20
    CONVOLVE = 21
    RECUR = 22
    GATED_NORM = 23
    GATE = 24
    MULTIPLY = 25
    ADD = 26
    CHOOSE_KEYS = 27


class GraphOp(ctypes.Structure):
    """Mirrors `GraphOp` of src/graph.h."""

    _fields_ = [
        ("kind", INT64),
        *members(POINTER, "subject", "operand", "out", "geometry"),
        *members(INT64, "stride", "out_stride", "size"),
        ("number", FLOAT),
    ]


_HOST_FUNCTION = ctypes.CFUNCTYPE(INT64, INT64)
"""`HostFunction` of src/graph.h."""


class HostCall:
    """What the host does in the middle of a pass, to the first tokens' rows of an activation.
    `failure`: what ended the pass."""

    def __init__(self, memory: torch.Tensor, change: AllReduce) -> None:
        self._memory = memory
        self._change = change
        self.failure: BaseException | None = None
        self.function = _HOST_FUNCTION(self._call)

    def _call(self, num_tokens: int) -> int:
        try:
            self._change(self._memory[:num_tokens])
        except BaseException as error:  # nothing may pass through the library
            self.failure = error
            return 1
        return 0
