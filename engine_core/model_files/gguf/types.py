"""The types of GGUF tensors: numbers, sizes of blocks, and which are read.

The same facts as `gguf.constants`; that package takes as long to import as a header to read, and
tries others that take much longer. How blocks become numbers is `dequantize`'s business.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and src/ggml-common.h
"""

import enum
from typing import Final


class GgmlType(enum.IntEnum):
    """A tensor's type by its number in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40


_T = GgmlType
BLOCKS: Final = {
    _T.F32: (1, 4),
    _T.F16: (1, 2),
    _T.Q4_0: (32, 18),
    _T.Q4_1: (32, 20),
    _T.Q5_0: (32, 22),
    _T.Q5_1: (32, 24),
    _T.Q8_0: (32, 34),
    _T.Q8_1: (32, 40),
    _T.Q2_K: (256, 84),
    _T.Q3_K: (256, 110),
    _T.Q4_K: (256, 144),
    _T.Q5_K: (256, 176),
    _T.Q6_K: (256, 210),
    _T.Q8_K: (256, 292),
    _T.IQ2_XXS: (256, 66),
    _T.IQ2_XS: (256, 74),
    _T.IQ3_XXS: (256, 98),
    _T.IQ1_S: (256, 50),
    _T.IQ4_NL: (32, 18),
    _T.IQ3_S: (256, 110),
    _T.IQ2_S: (256, 82),
    _T.IQ4_XS: (256, 136),
    _T.I8: (1, 1),
    _T.I16: (1, 2),
    _T.I32: (1, 4),
    _T.I64: (1, 8),
    _T.F64: (1, 8),
    _T.IQ1_M: (256, 56),
    _T.BF16: (1, 2),
    _T.TQ1_0: (256, 54),
    _T.TQ2_0: (256, 66),
    _T.MXFP4: (32, 17),
    _T.NVFP4: (64, 36),
}
"""Numbers in a block, and the bytes that they take."""
PLAIN = frozenset({_T.F64, _T.F32, _T.F16, _T.BF16})
BY_TORCH = frozenset({_T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q8_0, _T.Q4_K, _T.Q5_K, _T.Q6_K})
"""Dequantised by our own code; the others that are not plain, by the gguf package's."""
BY_GGUF = frozenset({
    _T.Q5_1, _T.Q2_K, _T.Q3_K, _T.TQ1_0, _T.TQ2_0, _T.MXFP4, _T.IQ2_XXS, _T.IQ2_XS, _T.IQ2_S,
    _T.IQ3_XXS, _T.IQ3_S, _T.IQ1_S, _T.IQ1_M, _T.IQ4_NL, _T.IQ4_XS,
})  # fmt: skip
SUPPORTED_TYPES = PLAIN | BY_TORCH | BY_GGUF
