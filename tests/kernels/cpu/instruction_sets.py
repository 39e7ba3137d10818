"""Cases of tests that run on every instruction set."""

import pytest

from kernels.cpu.library import ISA_NAMES
from tests.covering import covering_pairs

SETS = ISA_NAMES[:3]
"""Later ones have kernels of their own for some products alone, and tests of those."""


def covering_sets(**axes) -> pytest.MarkDecorator:
    """`covering_pairs` of these axes and of `SETS`: each value once on each set."""
    names, rows = covering_pairs(isa=SETS, **axes).args
    return pytest.mark.parametrize(names, rows, indirect=["isa"])
