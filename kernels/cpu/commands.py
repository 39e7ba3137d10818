"""Commands of a recorded forward pass, as the library reads them.

Owns the mirrors of src/program.h. Must not know who writes them.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

_POINTER, _INT64, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class CommandKind(IntEnum):
    """Those of `CommandKind` there, by its numbers."""

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


class Command(ctypes.Structure):
    """Mirrors `Command` of src/program.h."""

    _fields_ = (
        ("kind", _INT64),
        ("subject", _POINTER),
        ("operand", _POINTER),
        ("out", _POINTER),
        ("geometry", _POINTER),
        ("stride", _INT64),
        ("out_stride", _INT64),
        ("size", _INT64),
        ("number", _FLOAT),
    )


class AttentionCall(ctypes.Structure):
    """Mirrors `AttentionCall` there."""

    _fields_ = (
        ("k", _POINTER),
        ("v", _POINTER),
        ("sinks", _POINTER),
        ("slopes", _POINTER),
        ("num_blocks", _INT64),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
    )


class Step(ctypes.Structure):
    """Mirrors `Step` there."""

    _fields_ = (
        ("commands", _POINTER),
        ("num_commands", _INT64),
        ("capacity", _INT64),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("num_tokens", _INT64),
    )
