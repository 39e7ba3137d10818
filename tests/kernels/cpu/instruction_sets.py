"""Cases of tests that run on every instruction set."""

import pytest

from kernels.cpu.library import ARM_ISA_NAMES, ISA_NAMES
from tests.covering import covering_pairs

SETS = ISA_NAMES if ISA_NAMES == ARM_ISA_NAMES else ISA_NAMES[:3]
"""x86's later ones have kernels of their own for some products alone, and tests of those."""

KINDS = ISA_NAMES[:2] if ISA_NAMES == ARM_ISA_NAMES else SETS
"""Sets that differ in more than products."""


def covering_sets(**axes) -> pytest.MarkDecorator:
    """`covering_pairs` of these axes and of `SETS`: each value once on each set."""
    names, rows = covering_pairs(isa=SETS, **axes).args
    return pytest.mark.parametrize(names, rows, indirect=["isa"])
