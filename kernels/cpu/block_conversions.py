"""GGUF blocks of one type as blocks of another that holds the same numbers, bit for bit.

Owns conversions that lose nothing. Must not know the native library's layouts.

    Q5_0   22 bytes: scale f16, 32 high bits, 16 bytes of nibbles    scale * (code - 16)
    Q8_0   34 bytes: scale f16, 32 signed bytes                      scale * code
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_GROUP = 32
_Q5_0_BYTES = 22


def q5_0_as_q8_0(blocks: Bytes) -> Bytes:
    """uint8 [N, G * 22] -> [N, G * 34]: the same scales, and codes less 16 as signed bytes."""
    num_rows = len(blocks)
    groups = np.ascontiguousarray(blocks).reshape(-1, _Q5_0_BYTES)
    nibbles = groups[:, 6:]
    codes = np.concatenate((nibbles & 15, nibbles >> 4), axis=1)
    # bit i of the four bytes is the fifth bit of input i
    codes |= np.unpackbits(groups[:, 2:6], axis=1, bitorder="little") << 4
    converted = np.empty((len(groups), 2 + _GROUP), np.uint8)
    converted[:, :2] = groups[:, :2]
    converted[:, 2:] = codes - np.uint8(16)  # wraps: two's complement
    return converted.reshape(num_rows, -1)
